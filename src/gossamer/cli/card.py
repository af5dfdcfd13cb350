"""`gossamer card`: the model card of a finished run."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from tyro.conf import arg

from gossamer.cli.arguments import OptionalFile, at_home
from gossamer.cli.console import put
from gossamer.io.container import writable
from gossamer.lab.card import card_of_run


@dataclass(frozen=True)
class Card:
    """Write the model card of a finished run, a README.md for Hugging Face or another hub: results, how the network was
    trained, how to load it, and its limits."""

    run: Annotated[tyro.conf.Positional[Path], arg(metavar="DIR")]
    """Folder of a finished run."""
    out: OptionalFile = None
    """File to write, such as README.md. Default: print the card."""
    debug: bool = False
    """Show the traceback of an error."""

    def carry_out(self, console: Console) -> None:
        if self.out is None:
            put(card_of_run(at_home(self.run)).rstrip("\n"))
            return
        target = writable(at_home(self.out))
        target.write_text(card_of_run(at_home(self.run)), "utf-8")
        console.print(f"The card is in {target}", soft_wrap=True, highlight=False)
