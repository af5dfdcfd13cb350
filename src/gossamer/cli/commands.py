"""All commands by name, and the parser of the command line."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Literal, Protocol, Union

import tyro
from rich.console import Console

from gossamer.cli.card import Card
from gossamer.cli.console import Answer
from gossamer.cli.deploy import Compact, Export, Speed, Verify
from gossamer.cli.doctor import Doctor
from gossamer.cli.many import Compare, Sweep
from gossamer.cli.paper import Reproduce, TuneDecay
from gossamer.cli.run_options import with_values
from gossamer.cli.show import Frontier, List, Report
from gossamer.cli.train import Quickstart, Train
from gossamer.cli.tune import Tune


class Executable(Protocol):
    """The interface of a command."""

    @property
    def debug(self) -> bool: ...

    def carry_out(self, console: Console) -> Answer | None:
        """Execute the command, print its result for people, and return the answer for programs."""


@dataclass(frozen=True)
class Completion:
    """Print a script that completes commands and options in a shell. bash: gossamer completion bash >
    ~/.local/share/bash-completion/completions/gossamer. zsh: write it to a file _gossamer in a folder of $fpath."""

    shell: tyro.conf.Positional[Literal["bash", "zsh", "tcsh"]]
    debug: bool = False
    """Show the traceback of an error."""

    def carry_out(self, console: Console) -> None:
        parse(["--tyro-print-completion", self.shell])  # exits


COMMANDS: Mapping[str, type] = MappingProxyType(
    {
        "quickstart": Quickstart,
        "train": Train,
        "sweep": Sweep,
        "compare": Compare,
        "tune": Tune,
        "reproduce": Reproduce,
        "tune-decay": TuneDecay,
        "list": List,
        "report": Report,
        "frontier": Frontier,
        "speed": Speed,
        "verify": Verify,
        "compact": Compact,
        "export": Export,
        "card": Card,
        "doctor": Doctor,
        "completion": Completion,
    }
)
_ANY_COMMAND: Any = Union[tuple(Annotated[kind, tyro.conf.subcommand(name)] for name, kind in COMMANDS.items())]  # noqa: UP007 - made from a table


def parse(given: Sequence[str]) -> Executable:
    """The command of a command line, which exits if it is wrong."""
    command: Executable = tyro.cli(
        _ANY_COMMAND,
        args=with_values(given),
        prog="gossamer",
        description="Neural networks that become sparse while they train. `gossamer --version` shows the version.",
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    return command
