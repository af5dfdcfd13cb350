"""A report as an HTML page: one file that needs no network, for light and dark screens of any width.

Plotly draws the charts; its embedded code is nearly all of the file. It is imported only when a page is
written. The number of pictures and the points of a chart are bounded, so that the page of a network with thousands of
layers stays small.
"""

import base64
import html
import importlib.resources
import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from gossamer.flops import FLOPS_PER_MULTIPLY_ADD
from gossamer.io.container import writable
from gossamer.io.writer import stored_bytes
from gossamer.report.pictures import picture_of
from gossamer.report.rows import Row, short, total_of
from gossamer.report.terminal import as_text, fold

MOST_PICTURES = 120
MOST_POINTS = 1000  # of a line
_MOST_BARS = 300  # of a chart; more layers are drawn as a line
_NAMED = 10  # layers whose names fit below their bars
_HEIGHT = 250  # pixels of a chart that names none, as in page.js
_SIDE = 128  # pixels on the screen for the longer side of a picture
_IN_A_NOTEBOOK = 60  # lines of the table

Figure = Mapping[str, Any]


@dataclass(frozen=True)
class View:
    """One figure of plotly: traces and layout. A color such as `var(--accent)` is one of the style sheet."""

    label: str
    data: Sequence[Mapping[str, Any]]
    layout: Mapping[str, Any]


@dataclass(frozen=True)
class Chart:
    """A figure with a title, or several that buttons switch between."""

    title: str
    views: Sequence[View]
    note: str = ""
    wide: bool = False


@dataclass
class Page:
    """Collects the parts of a page in order."""

    title: str
    subtitle: str = ""
    parts: list[str] = field(default_factory=list)
    charts: list[Chart] = field(default_factory=list)
    layers: dict[str, list[Any]] = field(default_factory=dict)
    plain: str = ""
    """The content for a browser without JavaScript."""

    def add_facts(self, facts: Sequence[tuple[str, str, str]]) -> None:
        """Headline numbers: label, value, remark."""
        items = "".join(
            f'<div class="fact"><dt>{_escaped(label)}</dt><dd>{_escaped(value)}</dd>'
            f"{f'<dd>{_escaped(remark)}</dd>' if remark else ''}</div>"
            for label, value, remark in facts
        )
        self.parts.append(f'<dl class="facts">{items}</dl>')

    def add_heading(self, heading: str, note: str = "") -> None:
        self.parts.append(f"<h2>{_escaped(heading)}</h2>")
        if note:
            self.parts.append(f'<p class="note">{_escaped(note)}</p>')

    def add_charts(self, charts: Sequence[Chart]) -> None:
        figures = "".join(map(self._figure, charts))
        grid = f'<div class="charts">{figures}</div>'
        self.parts.append(grid if len(charts) > 1 else figures)

    def add_keys(self, keys: Sequence[tuple[str, str, str]]) -> None:
        """Buttons that show and hide the traces whose `meta` is the key: key, label, color."""
        buttons = "".join(
            f'<button type="button" aria-pressed="true" data-key="{_escaped(key)}">{_chip(color)}{_escaped(label)}'
            "</button>"
            for key, label, color in keys
        )
        self.parts.append(f'<div class="tools keys" role="group" aria-label="Shown lines">{buttons}</div>')

    def add_legend(self, entries: Sequence[tuple[str, str]]) -> None:
        """The meaning of colors."""
        items = "".join(f"<span>{_chip(color)}{_escaped(label)}</span>" for label, color in entries)
        self.parts.append(f'<div class="legend">{items}</div>')

    def add_table(self, head: Sequence[str], rows: Sequence[Sequence[str]], words: int = 1) -> None:
        """A table whose first `words` columns are text."""
        kinds = [' class="text"' if index < words else "" for index in range(len(head))]
        titles = "".join(f'<th scope="col"{kind}>{_escaped(each)}</th>' for each, kind in zip(head, kinds, strict=True))
        body = "".join(
            f"<tr>{''.join(f'<td{kind}>{_escaped(each)}</td>' for each, kind in zip(row, kinds, strict=True))}</tr>"
            for row in rows
        )
        self.parts.append(
            f'<div class="box" tabindex="0" role="region" aria-label="{_escaped(head[0])}"><table class="plain">'
            f"<thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table></div>"
        )

    def add_layers(
        self,
        rows: Sequence[Row],
        tensors: Mapping[str, Tensor],
        sizes: Mapping[str, tuple[int, int]],
        gradients: Mapping[str, float] | None = None,
    ) -> None:
        """Charts and a table of the layers, and pictures of those in `tensors`. `sizes` are of `sizes_of`, `gradients`
        the root mean squares of the mask gradients."""
        self.layers = _columns(rows, sizes)
        self.plain = as_text(rows)
        self.add_heading("Layers", "Every prunable tensor, in the order of the model. The chart counts them by number.")
        views = _layer_views(rows, sizes, gradients or {})
        self.parts.append(self._figure(Chart("Layer by layer", views, wide=True)))
        self.parts.append(_layer_table(self.layers))
        self._add_pictures(rows, tensors)

    def to_html(self) -> str:
        """The whole file."""
        content = {
            "charts": [{"views": [_figure_of(view) for view in chart.views]} for chart in self.charts],
            "layers": self.layers,
        }
        data = json.dumps(content, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
        about = f"<p>{_escaped(self.subtitle)}</p>" if self.subtitle else ""
        plain = f"<noscript><pre>{_escaped(self.plain)}</pre></noscript>" if self.plain else ""
        return "\n".join(
            (
                "<!doctype html>",
                '<html lang="en">',
                '<head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">',
                '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">',
                f"<title>{_escaped(self.title)}</title>",
                f"<style>{_resource('page.css')}</style></head>",
                f"<body><main><header><h1>{_escaped(self.title)}</h1>{about}</header>",
                plain,
                *self.parts,
                "<footer>Written by gossamer. This file needs no network.</footer></main>",
                f'<script type="application/json" id="content">{data}</script>',
                f"<script>{_plotly()}</script>",
                f"<script>{_resource('page.js')}</script>",
                "</body></html>\n",
            )
        )

    def _figure(self, chart: Chart) -> str:
        number = len(self.charts)
        self.charts.append(chart)
        buttons = "".join(
            f'<button type="button" aria-pressed="{str(index == 0).lower()}" data-view-of="{number}" '
            f'data-number="{index}">{_escaped(view.label)}</button>'
            for index, view in enumerate(chart.views)
        )
        views = f'<span class="views">{buttons}</span>' if len(chart.views) > 1 else ""
        note = f"<small>{_escaped(chart.note)}</small>" if chart.note else ""
        return (
            f"<figure{' class=wide' if chart.wide else ''}><figcaption>{_escaped(chart.title)}{note}{views}"
            f'</figcaption><div class="plot" style="min-height:{_height(chart)}px" data-chart="{number}" '
            f'data-view="0" role="img" aria-label="Chart: {_escaped(chart.title)}"></div></figure>'
        )

    def _add_pictures(self, rows: Sequence[Row], tensors: Mapping[str, Tensor]) -> None:
        there = [(number, row) for number, row in enumerate(rows, 1) if row.weights and row.name in tensors]
        if not there:
            return
        largest = sorted(there, key=lambda each: -each[1].weights)[:MOST_PICTURES]
        left_out = (
            f" Of {len(there):,} layers the {MOST_PICTURES} largest are shown." if len(there) > len(largest) else ""
        )
        self.add_heading(
            "Connectivity",
            "Where the nonzeros are: outputs from top to bottom, inputs from left to right. In large layers a pixel is "
            f"a block of weights, and the strongest pixel is the densest block.{left_out}",
        )
        figures = (_picture(number, row, tensors[row.name]) for number, row in sorted(largest))
        self.parts.append(f'<div class="pictures">{"".join(figures)}</div>')


def page_of(rows: Sequence[Row], tensors: Mapping[str, Tensor], *, title: str) -> Page:
    """The page of a model."""
    page = Page(title, _in_words(rows))
    sizes = sizes_of(rows, tensors)
    page.add_facts(facts_of(rows, total_size(rows, sizes)))
    page.add_layers(rows, tensors, sizes)
    return page


def write_page(page: Page, path: Path) -> Path:
    """Write the page to a path given by the user."""
    if importlib.util.find_spec("plotly") is None:
        raise ImportError("an HTML report needs plotly, which is not installed: pip install 'gossamer[report]'")
    target = writable(path)
    target.write_text(page.to_html(), "utf-8")
    return path


def facts_of(rows: Sequence[Row], sizes: tuple[int, int] | None) -> list[tuple[str, str, str]]:
    """The headline numbers of a model: `sizes` are bytes dense and sparse."""
    total = total_of(rows)
    facts = [("Sparsity", f"{1 - total.density:.2%}", f"{total.nonzeros:,} of {total.weights:,} weights are nonzero")]
    if total.flops_dense and total.flops_sparse is not None:
        remark = f"of {short(total.flops_dense / 2)} dense{_times(total.flops_dense, total.flops_sparse, 'fewer')}"
        facts.append(("Multiply-adds", short(total.flops_sparse / 2), f"{remark}, per sample"))
    if sizes is not None:
        dense, sparse = sizes
        facts.append(("Size", in_bytes(sparse), f"of {in_bytes(dense)} dense{_times(dense, sparse, 'smaller')}"))
    dead_layers = sum(row.nonzeros == 0 and row.weights > 0 for row in rows)
    remark = f"of {total.features:,} outputs of layers" + (
        f"; {dead_layers} layers without any weight" if dead_layers else ""
    )
    facts.append(("Dead features", f"{total.dead_features:,}", remark))
    return facts


def sizes_of(rows: Sequence[Row], tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, int]]:
    """Bytes of each tensor: dense, and in a sparse file before entropy coding."""
    own = {row.name: tensors[row.name] for row in rows if row.name in tensors}
    return {name: (each.numel() * each.element_size(), stored_bytes(each)) for name, each in own.items()}


def total_size(rows: Sequence[Row], sizes: Mapping[str, tuple[int, int]]) -> tuple[int, int] | None:
    """The sum of `sizes`; None unless all tensors have theirs."""
    if len(sizes) < len(rows):
        return None
    return sum(dense for dense, _ in sizes.values()), sum(sparse for _, sparse in sizes.values())


def thinned(values: Sequence[Any], most: int = MOST_POINTS) -> list[Any]:
    """At most this many of the values, evenly spaced, with the first and the last."""
    if len(values) <= most:
        return list(values)
    return [values[round(index * (len(values) - 1) / (most - 1))] for index in range(most)]


def in_bytes(number: float) -> str:
    return f"{short(number)}B" if number >= 1000 else f"{number:.0f} B"


def notebook_table(rows: Sequence[Row]) -> str:
    """The table of a report for a notebook: repeated blocks folded, bars of density, no scripts."""
    folded = [each.total for each in fold(rows)]
    lines = [*folded[:_IN_A_NOTEBOOK], total_of(rows)]
    with_flops = any(row.flops_dense is not None for row in rows)
    head = ["layer", "weights", "nonzeros", "density", "dead", *(["FLOPs"] if with_flops else [])]
    left, right = "text-align:left", "text-align:right"
    titles = "".join(f'<th style="{left if index in (0, 3) else right}">{each}</th>' for index, each in enumerate(head))
    body = []
    for row in lines:
        bar = (
            '<span style="display:inline-block;width:80px;height:9px;background:#0b7f7433;margin-right:8px">'
            f'<span style="display:block;height:9px;width:{100 * row.density:.1f}%;background:#0b9486"></span></span>'
        )
        dead = f"{row.dead_features:,}" if row.dead_features else "–"
        cells = [f"{row.weights:,}", f"{row.nonzeros:,}", f"{bar}{row.density:.2%}", dead]
        cells += [short(row.flops_sparse)] if with_flops else []
        tail = "".join(f'<td style="{left if index == 2 else right}">{each}</td>' for index, each in enumerate(cells))
        body.append(f'<tr><td style="{left}">{_escaped(row.name)}</td>{tail}</tr>')
    more = len(folded) - _IN_A_NOTEBOOK
    note = f"<p>and {more:,} more lines: see save_html</p>" if more > 0 else ""
    return f"<table><thead><tr>{titles}</tr></thead><tbody>{''.join(body)}</tbody></table>{note}"


def _in_words(rows: Sequence[Row]) -> str:
    return f"{len(rows):,} prunable tensor{'' if len(rows) == 1 else 's'}, {total_of(rows).weights:,} weights"


def _columns(rows: Sequence[Row], sizes: Mapping[str, tuple[int, int]]) -> dict[str, list[Any]]:
    """The table of layers by column, without unknown columns."""
    columns: dict[str, list[Any]] = {
        "name": [row.name for row in rows],
        "type": [row.type for row in rows],
        "shape": [" × ".join(map(str, row.shape)) for row in rows],
        "weights": [row.weights for row in rows],
        "nonzeros": [row.nonzeros for row in rows],
        "density": [row.density for row in rows],
        "dead": [row.dead_features for row in rows],
        "features": [row.features for row in rows],
    }
    if rows and all(row.flops_sparse is not None for row in rows):
        columns["macs"] = [(row.flops_sparse or 0) // FLOPS_PER_MULTIPLY_ADD for row in rows]
    if len(sizes) == len(rows):
        columns["bytes"] = [sizes[row.name][1] for row in rows]
    return columns


def _layer_table(columns: Mapping[str, Any]) -> str:
    titles = {
        **{"number": "#", "name": "layer", "density": "density", "nonzeros": "nonzeros", "weights": "weights"},
        **{"dead": "dead", "macs": "multiply-adds", "bytes": "size", "type": "type", "shape": "shape"},
    }
    rising = ' aria-sort="ascending"'
    head = "".join(
        f'<th scope="col" class="sortable{" text" if name in ("name", "type") else ""}" data-column="{name}"'
        f"{rising if name == 'number' else ''}>"
        f'<button type="button">{title}</button></th>'
        for name, title in titles.items()
        if name == "number" or name in columns
    )
    return (
        '<div class="tools"><label class="hidden" for="filter">Filter the layers by name or type</label>'
        '<input type="search" id="filter" placeholder="Filter by name or type">'
        '<span id="shown" class="note" role="status"></span></div>'
        '<div class="box" tabindex="0" role="region" aria-label="Layers"><table id="layers">'
        f"<thead><tr>{head}</tr></thead><tbody></tbody></table></div>"
        '<div class="tools"><button type="button" id="more" hidden>Show more</button></div>'
    )


def _layer_views(
    rows: Sequence[Row], sizes: Mapping[str, tuple[int, int]], gradients: Mapping[str, float]
) -> list[View]:
    """The views of the chart of layers."""
    overall = 100 * total_of(rows).density
    density = [100 * row.density for row in rows]
    line = {"color": "var(--warm)", "width": 1.5, "dash": "dot"}
    whole = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": overall, "y1": overall, "line": line}
    views = [
        View(
            "Density",
            [_bars(density, "var(--accent)", "%{y:.2f}% nonzero")],
            _over_layers(rows, "nonzero, % (dotted: whole network)", shapes=[whole], **_percent_axis(density)),
        )
    ]
    if rows and all(row.flops_dense is not None for row in rows):
        dense = [(row.flops_dense or 0) / 2 for row in rows]
        sparse = [(row.flops_sparse or 0) / 2 for row in rows]
        views.append(_before_and_after("Multiply-adds", rows, dense, sparse, "%{y:.3s} multiply-adds"))
    if len(sizes) == len(rows):
        both = [sizes[row.name] for row in rows]
        views.append(
            _before_and_after("Bytes", rows, [each[0] for each in both], [each[1] for each in both], "%{y:.3s}B")
        )
    dead = [100 * row.dead_features / row.features if row.features else 0.0 for row in rows]
    views.append(
        View(
            "Dead features",
            [_bars(dead, "var(--warm)", "%{y:.1f}% of the output features are dead")],
            _over_layers(rows, "dead output features, %", **_percent_axis(dead)),
        )
    )
    if any(gradients.values()):
        known = [gradients.get(row.name) or None for row in rows]
        trace = {
            "x": _numbers_of(rows), "y": known, "type": "scatter", "mode": "markers", "meta": "layers",
            "marker": {"color": "var(--accent)", "size": 8},
            "hovertemplate": "%{hovertext}<br>RMS %{y:.3g}<extra></extra>",
        }  # fmt: skip
        views.append(View("Mask gradient", [trace], _over_layers(rows, "RMS of the mask gradient", type="log")))
    return views


def _before_and_after(
    label: str, rows: Sequence[Row], dense: Sequence[float], sparse: Sequence[float], shown: str
) -> View:
    return View(
        label,
        [
            _bars(dense, "var(--dense)", f"dense: {shown}"),
            _bars(sparse, "var(--accent)", f"sparse: {shown}"),
        ],
        {
            **_over_layers(rows, f"{label.lower()} (gray: dense)", tickformat="~s", rangemode="tozero"),
            "barmode": "overlay",
        },
    )


def _bars(values: Sequence[float], color: str, shown: str) -> dict[str, Any]:
    """Bars, or for very many layers the outline of their bars. The page adds the names."""
    trace: dict[str, Any] = {
        "x": list(range(1, len(values) + 1)),
        "y": list(values),
        "meta": "layers",
        "hovertemplate": f"%{{hovertext}}<br>{shown}<extra></extra>",
    }
    if len(values) <= _MOST_BARS:
        return {**trace, "type": "bar", "marker": {"color": color, "line": {"width": 0}}}
    line = {"color": color, "width": 1, "shape": "hvh"}
    return {**trace, "type": "scatter", "mode": "lines", "line": line, "fill": "tozeroy"}


def _percent_axis(values: Sequence[float]) -> dict[str, Any]:
    """An axis up to 100 %, or up to the largest value if all are small."""
    return {"range": [0, 100]} if max(values, default=100) > 40 else {"rangemode": "tozero"}


def _over_layers(rows: Sequence[Row], title: str, *, shapes: Sequence[Any] = (), **axis: Any) -> dict[str, Any]:
    if len(rows) <= _NAMED:
        names = [row.name.removesuffix(".weight") for row in rows]
        ticks: dict[str, Any] = {"tickvals": _numbers_of(rows), "ticktext": [each[-24:] for each in names]}
    else:
        ticks = {"title": {"text": "number of the layer"}, "tick0": 1, "tickformat": "d"}
        ticks |= {"dtick": 1} if len(rows) <= 2 * _NAMED else {}
    return {
        "height": 300,
        "bargap": 0.15 if len(rows) <= _MOST_BARS else 0,
        "xaxis": {"showgrid": False, "range": [0.4, len(rows) + 0.6], **ticks},
        "yaxis": {"title": {"text": title}, **axis},
        "shapes": list(shapes),
    }


def _numbers_of(rows: Sequence[Row]) -> list[int]:
    return list(range(1, len(rows) + 1))


def _picture(number: int, row: Row, tensor: Tensor) -> str:
    picture = picture_of(tensor)
    scale = _SIDE / max(picture.width, picture.height)
    width, height = (max(2, round(scale * each)) for each in (picture.width, picture.height))
    data = base64.b64encode(picture.png).decode()
    about = f"{row.density:.1%} nonzero; densest {picture.densest:.0%}" if row.nonzeros else "no nonzeros"
    return (
        f'<figure><div class="frame"><img alt="Nonzeros of {_escaped(row.name)}" width="{width}" height="{height}" '
        f'loading="lazy" src="data:image/png;base64,{data}"></div><figcaption>{number}. {_escaped(row.name)}<br>'
        f"{' × '.join(map(str, row.shape))}, {about}</figcaption></figure>"
    )


def _figure_of(view: View) -> dict[str, Any]:
    return {"data": list(view.data), "layout": dict(view.layout)}


def _height(chart: Chart) -> int:
    """The height of a chart before it is drawn, so that the page does not move."""
    return int(chart.views[0].layout.get("height", _HEIGHT)) if chart.views else _HEIGHT


def _times(before: float, after: float, word: str) -> str:
    return f", {before / after:.1f} times {word}" if after and before > after else ""


def _chip(color: str) -> str:
    return f'<span class="chip" style="background:{color}"></span>'


def _escaped(text: str) -> str:
    return html.escape(text, quote=True)


def _resource(name: str) -> str:
    return importlib.resources.files("gossamer.report").joinpath(name).read_text("utf-8")


def _plotly() -> str:
    from plotly.offline import get_plotlyjs  # optional, and slow to import

    return str(get_plotlyjs())
