"""The table of modes that `gossamer train` reads (training/modes.json), from what `throughput.py` has measured."""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from throughput_steps import Case, modes_of

from gossamer.lab.training.modes import Measured, Mode

ENOUGH = 0.97  # of the fastest mode's speed, for a simpler one to be taken
COMPILING_GAINS = 0.9  # of the time of the same mode that is not compiled is what a compiled one may take

Record = dict[str, Any]


def write_modes(path: Path, record: Record, cases: dict[str, Case]) -> None:
    """Put the simplest mode that is about as fast as the fastest into the table, and when it is worth compiling."""
    table = json.loads(path.read_text())
    measured = table.setdefault(record["hardware"], {})
    for name, case in cases.items():
        tried = record["networks"].get(name, {}).get("tried", {})
        good = {mode: entry for mode, entry in tried.items() if "error" not in entry}
        eager = simplest_fast_mode(case, good) or mode_in(measured.get(name, {}))
        if str(eager) in good:
            measured[name] = asdict(entry_of(eager, good))
    path.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")


def simplest_fast_mode(case: Case, good: Record) -> Mode | None:
    """Modes are tried from the plain one on. None where they were measured at different commits: the fastest one alone
    is measured again after a change, and what the table had stays."""
    eager = [mode for mode in modes_of(case.entry, compiled=False) if str(mode) in good]
    if len({good[str(mode)].get("commit") for mode in eager}) != 1:
        return None
    least = min(good[str(mode)]["sparse_ms"] for mode in eager)
    return next(mode for mode in eager if ENOUGH * good[str(mode)]["sparse_ms"] <= least)


def mode_in(entry: Record) -> Mode:
    return Mode(**{name: value for name, value in entry.items() if not name.startswith("compile_from")})


def entry_of(eager: Mode, good: Record) -> Measured:
    steps = pays_from(replace(eager, capture=True), good)  # what is compiled is captured too
    return Measured(eager.precision, eager.channels_last, eager.capture or steps is not None, compile_from=steps)


def pays_from(eager: Mode, good: Record) -> int | None:
    """The steps after which a compiled step has saved what it took to compile it; none where it does not save enough,
    or was not measured at the same commit."""
    slow, fast = good.get(str(eager)), good.get(str(replace(eager, compile=True)))
    if slow is None or fast is None or slow.get("commit") != fast.get("commit"):
        return None
    if fast["sparse_ms"] >= COMPILING_GAINS * slow["sparse_ms"]:
        return None
    return math.ceil(1e3 * fast["start_up_s"] / (slow["sparse_ms"] - fast["sparse_ms"]))
