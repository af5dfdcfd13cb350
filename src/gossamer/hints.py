"""Hints in error messages about misspelt names."""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches


def did_you_mean(
    name: str, known: Iterable[str], otherwise: str, *, most: int = 1, in_full: Mapping[str, str] | None = None
) -> str:
    """A question with the known names that are most similar to `name`; `otherwise` if none is similar.

    `in_full` maps known names to the longer names that the question shows.
    """
    near = get_close_matches(name, [*known], n=most)
    shown = [repr((in_full or {}).get(each, each)) for each in near]
    return f"did you mean {' or '.join(shown)}?" if shown else otherwise
