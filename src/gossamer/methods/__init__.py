"""SCL and its peers as rules of one kind, one file each, so that they can be held against each other.

`side_by_side` trains many of them at once as rows of one stacked network; `attach` drives one of them on any model and
any optimizer of torch. docs/methods.md has a card of each.
"""

from gossamer.methods.registry import ALIASES, METHODS, find, make_options
from gossamer.methods.rule import Layout, Options, Request, Rule, Timeline

__all__ = ["ALIASES", "METHODS", "Layout", "Options", "Request", "Rule", "Timeline", "find", "make_options"]
