"""The table of a report for a terminal of 80 columns: repeated blocks folded into one line, bars of density."""

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gossamer.report.rows import Row, short, total_of

WIDTH = 80
_BAR = 6  # characters of a full bar
_EIGHTHS = " ▏▎▍▌▋▊▉"
_Named = tuple[tuple[str, ...], tuple[Row, ...]]  # the parts of a name, and its rows
_FEWEST = 3  # minimum number of rows to fold
_EXACT = 1_000_000  # larger numbers are rounded to three digits


@dataclass(frozen=True)
class Folded:
    """Rows of the same layer in repeated blocks, under one name such as `layers.{0..11}.attention.weight`."""

    name: str
    rows: tuple[Row, ...]

    @property
    def total(self) -> Row:
        """The sums of the rows; for a single row, the row itself."""
        return replace(self.rows[0], name=self.name) if len(self.rows) == 1 else total_of(self.rows, self.name)


def fold(rows: Sequence[Row]) -> list[Folded]:
    """Join rows of the same type and shape whose names differ only in a number, in the order of their first rows."""
    found: list[_Named] = [(tuple(row.name.split(".")), (row,)) for row in rows]
    for place in range(max((len(parts) for parts, _ in found), default=0) - 1, -1, -1):
        found = _folded_at(place, found)
    return [Folded(".".join(parts), own) for parts, own in found]


def _folded_at(place: int, named: Sequence[_Named]) -> list[_Named]:
    """Fold the number at one position of the names."""
    groups: dict[tuple[object, ...], list[_Named]] = {}
    for number, (parts, rows) in enumerate(named):
        if place < len(parts) and parts[place].isdecimal():
            key: tuple[object, ...] = (parts[:place], parts[place + 1 :], rows[0].type, rows[0].shape)
        else:
            key = (number,)
        groups.setdefault(key, []).append((parts, rows))
    found: list[_Named] = []
    for group in groups.values():
        if sum(len(rows) for _, rows in group) < _FEWEST or len(group) == 1:
            found += group
            continue
        parts = group[0][0]
        numbers = _numbers([int(each[place]) for each, _ in group])
        rows = tuple(row for _, own in group for row in own)
        found.append(((*parts[:place], numbers, *parts[place + 1 :]), rows))
    return found


def _numbers(given: Sequence[int]) -> str:
    """`{0..11}` for consecutive numbers, `{0,3,6}` for others, without the middle if there are many."""
    ordered = sorted(given)
    if ordered == list(range(ordered[0], ordered[-1] + 1)):
        return f"{{{ordered[0]}..{ordered[-1]}}}"
    several = [*map(str, ordered)] if len(ordered) <= 6 else [*map(str, ordered[:3]), "…", str(ordered[-1])]
    return f"{{{','.join(several)}}}"


def bar(density: float, width: int = _BAR) -> str:
    """A bar whose full `width` is 100 %; any density above zero is visible."""
    eighths = round(density * width * 8)
    full, rest = divmod(max(eighths, 1 if density > 0 else 0), 8)
    return ("█" * full + (_EIGHTHS[rest] if rest else "")).ljust(width)


def table_of(rows: Sequence[Row], title: str | None = None) -> Table:
    """A table for rich of at most 80 columns, with one line per tensor or fold."""
    with_flops = any(row.flops_dense is not None for row in rows)
    with_patterns = any(row.pattern for row in rows)
    head = ["layer", "weights", "nonzeros", "density", "dead"]
    head += [*(["FLOPs"] if with_flops else []), *(["pattern"] if with_patterns else [])]
    folded = [each.total for each in fold(rows)]
    body = [_cells(row, with_flops, with_patterns) for row in (*folded, total_of(rows))]
    widths = [max(map(len, column)) for column in zip(head, *body, strict=True)]
    room = WIDTH - 3 - sum(width + 2 for width in widths[1:])  # two columns apart, and the margins
    heading = None if title is None else Text(title, "bold")
    table = Table(box=box.SIMPLE_HEAD, show_footer=True, title=heading, title_justify="left", padding=(0, 1, 0, 0))
    table.caption, table.caption_justify = Text(_summary(total_of(rows))), "left"
    for index, (name, foot) in enumerate(zip(head, body[-1], strict=True)):
        words = name in ("layer", "density")
        # no markup: names of modules may contain brackets
        table.add_column(
            Text(name), footer=Text(foot), justify="left" if words else "right", no_wrap=index > 0, overflow="fold"
        )
    for cells in body[:-1]:
        table.add_row(Text(_wrapped(cells[0], room)), *map(Text, cells[1:]))
    return table


def _cells(row: Row, with_flops: bool, with_patterns: bool) -> list[str]:
    """The cells of a row. The name is that of the layer, or of the tensor if it is not called `weight`."""
    density = f"{bar(row.density)} {row.density:>5.1%}"
    dead = short(row.dead_features).replace(" ", "") if row.dead_features else "–"
    cells = [row.name.removesuffix(".weight"), _count(row.weights), _count(row.nonzeros), density, dead]
    cells += [short(row.flops_sparse)] if with_flops else []
    return [*cells, row.pattern or "–"] if with_patterns else cells


def _summary(total: Row) -> str:
    """The totals of the table in a line."""
    said = [f"{1 - total.density:.2%} sparse"]
    if total.flops_dense and total.flops_sparse is not None:
        said.append(f"{short(total.flops_sparse)} of {short(total.flops_dense)} FLOPs per sample")
    return ", ".join(said)


def _wrapped(name: str, width: int) -> str:
    """Break a long name after its dots, and parts that are still too long after underscores."""
    parts = [
        piece
        for part in re.split(r"(?<=[^.]\.)(?!\.)", name)
        for piece in (re.split(r"(?<=_)", part) if len(part) > width - 2 else [part])
    ]
    lines = [""]
    for part in parts:
        if lines[-1].strip() and len(lines[-1]) + len(part) > width:
            lines.append("  ")
        lines[-1] += part
    return "\n".join(lines)


def as_text(rows: Sequence[Row]) -> str:
    """The table as plain text of at most 80 columns."""
    text = io.StringIO()
    console = Console(file=text, color_system=None, width=WIDTH, markup=False, legacy_windows=False)
    console.print(table_of(rows))
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()).strip("\n")


def _count(number: int) -> str:
    return f"{number:,}" if number < _EXACT else short(number)
