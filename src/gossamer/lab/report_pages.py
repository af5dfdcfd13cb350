"""Pages of finished runs, sweeps and comparisons: what `gossamer report --html` writes."""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from gossamer.io.checkpoints import read_checkpoint
from gossamer.lab.frontier import FRONTIER, WITHIN, frontier_table, read_frontier
from gossamer.lab.json_files import MOST_BYTES, read_object
from gossamer.lab.results.comparisons import by_epochs, displayed, subjects
from gossamer.lab.results.plot import Line, Panel, lowest, panels
from gossamer.lab.training.result import HEALTH, MODEL, RESULT, SPARSE_MODEL, is_number, read_layers, read_result_file
from gossamer.methods import METHODS
from gossamer.report.page import Chart, Page, View, facts_of, sizes_of, thinned
from gossamer.report.style import style_of

_MOST_NEIGHBOURS = 200
SPEED = "speed.json"  # what `gossamer speed --out` writes, beside the model
_LOG = "log.jsonl"
_PHASES = {
    "warm-up": ("dense warm-up", "var(--page)"),
    "sparsify": ("sparsify", "var(--band)"),
    "stabilise": ("stabilise", "var(--accent-soft)"),
    "fine-tune": ("fine-tune", "var(--page)"),
}
_LONGEST = 1e9  # milliseconds


# --- one run ---


def page_of_run(folder: Path, dense: Mapping[str, Any] | None = None) -> Page:
    """The page of a finished run. `dense` is the result of the same run without masks, to compare with. Without it, a
    dense run in a folder beside this one serves. Finished runs there of the same network, data and epochs are shown
    together with this one."""
    result, rows = read_result_file(folder), read_layers(folder).rows
    model = folder / MODEL
    tensors: dict[str, Tensor] = read_checkpoint(model) if model.is_file() else {}
    own = [(row, tensors[row.name]) for row in rows if row.name in tensors]
    tensors = {row.name: each for row, each in own if each.shape == row.shape and each.ndim > 1 and each.numel()}
    page = Page(f"{result.get('model', 'Run')} on {result.get('data', 'its data')}", _about(result))
    speed = read_speed(folder / SPEED)
    others = _neighbours(folder, result)
    if dense is None:
        dense = next((each for each in others if each.get("method") == "dense"), None)
    metric = "perplexity" if "perplexity" in result else "accuracy"
    sparsity, *sizes = facts_of(rows, _file_sizes(folder))
    page.add_facts([sparsity, _metric_fact(metric, result, dense), *sizes, *_speed_facts(speed)])
    health = _health(folder / HEALTH)
    _add_training(page, _log(folder / _LOG), health, metric)
    _add_neighbours(page, [result, *others])
    _add_frontier(page, folder / FRONTIER)
    gradients = {layer["name"]: layer["gradient_scale"] for layer in health.get("layers", ())}
    page.add_layers(rows, tensors, sizes_of(rows, tensors), gradients)
    _add_speed(page, speed)
    return page


def _about(result: Mapping[str, Any]) -> str:
    name = str(result.get("method", ""))
    method = METHODS[name].title if name in METHODS else name
    hardware = result.get("hardware")
    hardware = hardware if isinstance(hardware, dict) else {}
    parts = [
        method,
        f"{result['epochs']} epochs" if "epochs" in result else "",
        f"seed {result['seed']}" if "seed" in result else "",
        f"{result['seconds']:.0f} s",
        str(hardware.get("gpu") or hardware.get("cpu") or ""),
    ]
    return " · ".join(filter(None, parts))


def _metric_fact(metric: str, result: Mapping[str, Any], dense: Mapping[str, Any] | None) -> tuple[str, str, str]:
    def said(value: float) -> str:
        return f"{value:.2%}" if metric == "accuracy" else f"{value:.2f}"

    remarks = [] if dense is None else [f"{said(dense[metric])} dense"]
    validation = result.get(f"validation_{metric}")
    remarks += [] if validation is None else [f"{said(validation)} on the validation set"]
    return f"Test {metric}", said(result[metric]) if metric in result else "–", ", ".join(remarks)


def _file_sizes(folder: Path) -> tuple[int, int] | None:
    files = folder / MODEL, folder / SPARSE_MODEL
    return (files[0].stat().st_size, files[1].stat().st_size) if all(each.is_file() for each in files) else None


def _log(path: Path) -> list[dict[str, Any]]:
    """The lines of a log; what a kill has left incomplete is skipped."""
    found = []
    if path.is_file() and (size := path.stat().st_size) > MOST_BYTES:
        raise ValueError(f"expected a log of at most {MOST_BYTES} bytes in {path}, got {size} bytes: delete it")
    for line in path.read_text("utf-8", errors="replace").splitlines() if path.is_file() else ():
        try:
            values = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(values, dict) and is_number(values.get("step")):
            found.append(values)
    return found


def _health(path: Path) -> dict[str, Any]:
    """The diagnostics of the masks; empty for runs without them, and for those of earlier versions."""
    if not path.is_file():
        return {}
    found = read_object(path, "the diagnostics of a run", ": delete it")
    traces = [found.get(name) for name in ("steps", "decay", "nonzeros", "flips")]
    layers = found.get("layers")
    if (
        not all(isinstance(each, list) and all(map(_is_number_or_none, each)) for each in traces)
        or len({len(each) for each in traces if each is not None}) != 1
        or not isinstance(layers, list)
        or not all(isinstance(each, dict) and {"name", "gradient_scale"} <= each.keys() for each in layers)
        or not all(isinstance(each["name"], str) and _is_number_or_none(each["gradient_scale"]) for each in layers)
    ):
        raise ValueError(f"expected the diagnostics of a run in {path}, got something else: delete it")
    return found


def _is_number_or_none(value: object) -> bool:
    return value is None or is_number(value)


def _add_training(page: Page, log: Sequence[Mapping[str, Any]], health: Mapping[str, Any], metric: str) -> None:
    if not log:
        return
    bands, shown = _bands(log)
    share = 100 if metric == "accuracy" else 1
    unit = ", %" if metric == "accuracy" else ""

    def line(name: str, color: str = "var(--accent)", scale: float = 1, label: str = "", **line: Any) -> dict[str, Any]:
        known = [each for each in log if is_number(each.get(name)) and is_number(scale * each[name])]
        points = [(each["step"], scale * each[name]) for each in known]
        return _trace(points, label or name, color, **line)

    def chart(title: str, traces: Sequence[dict[str, Any]], note: str = "", **axis: Any) -> Chart:
        traces = [each for each in traces if each["x"]]
        steps = {"title": {"text": "step"}, "tickformat": "~s", "range": [0, log[-1]["step"]]}
        return Chart(title, [View(title, traces, {"shapes": bands, "xaxis": steps, "yaxis": axis})], note)

    best = {"range": [_low([each.get("validation", each.get("train")) for each in log]), 100]} if share == 100 else {}
    dots = {"dash": "dot", "width": 1}
    charts = [
        chart(
            f"{metric.capitalize()}{unit}",
            [
                line("train", "var(--dense)", share, "training", **dots),
                line("validation", "var(--accent)", share),
            ],
            "dotted: training",
            **best,
        ),
        chart("Loss", [line("loss")], "mean over the training batches", type="log"),
        chart("Sparsity, %", [line("sparsity", scale=100)], range=[0, 100]),
        chart("Learning rate", [line("lr", label="learning rate")], rangemode="tozero"),
    ]
    if health:
        steps = health["steps"]
        decay = [(step, value) for step, value in zip(steps, health["decay"], strict=True) if value is not None]
        flips = list(zip(steps, health["flips"], strict=True))
        charts += [
            chart("λ₁", [_trace(decay, "λ₁", "var(--warm)")], "the connectivity decay", tickformat="~g"),
            chart("Flips", [_trace(flips, "flips", "var(--warm)")], "masks changed since the last point"),
        ]
    page.add_heading("Training")
    page.add_legend(shown)
    page.add_charts([each for each in charts if each.views[0].data])


def _low(values: Sequence[Any]) -> float:
    """The lower end of an axis of percentages, such that most of the curve uses most of the room."""
    known = sorted(100 * value for value in values if is_number(value))
    return max(0.0, 10 * (known[len(known) // 10] // 10) - 10) if known else 0.0


def _trace(points: Sequence[tuple[float, float]], label: str, color: str, **line: Any) -> dict[str, Any]:
    kept = thinned(points)
    return {
        "type": "scatter",
        "mode": "lines",
        "name": label,
        "x": [x for x, _ in kept],
        "y": [y for _, y in kept],
        "line": {"color": color, "width": 2, **line},
        "hovertemplate": f"step %{{x:,}}<br>{label} %{{y:.4g}}<extra></extra>",
    }


def _bands(log: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[tuple[str, str]]]:
    """The phases of a run as shaded parts of its charts, and their legend."""
    spans: dict[str, tuple[float, float]] = {}
    before = 0.0
    for each in log:
        phase, step = str(each.get("phase")), each["step"]
        spans[phase] = (spans[phase][0] if phase in spans else before, step)
        before = step
    known = [(name, _PHASES[name]) for name in spans if name in _PHASES]
    bands = [
        {
            "type": "rect", "layer": "below", "yref": "paper", "y0": 0, "y1": 1, "line": {"width": 0},
            "x0": spans[name][0], "x1": spans[name][1], "fillcolor": color,
        }
        for name, (_, color) in known
    ]  # fmt: skip
    return bands, [(label, color) for _, (label, color) in known] if len(known) > 1 else []


# --- the runs beside it ---


def _neighbours(folder: Path, result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The results in folders beside that of a run, of the same network, data and epochs."""
    same = ("model", "data", "epochs")
    found = []
    for path in sorted(folder.resolve().parent.glob(f"*/{RESULT}"))[:_MOST_NEIGHBOURS]:
        if path.parent == folder.resolve():
            continue
        try:
            other = read_result_file(path)
        except (ValueError, OSError):  # no result of a run, or a damaged one, which is not what was asked about
            continue
        if all(other.get(name) == result.get(name) and name in other for name in same):
            found.append(other)
    return found


def _add_neighbours(page: Page, results: Sequence[Mapping[str, Any]]) -> None:
    if len(results) < 2 or any("accuracy" not in each for each in results):
        return
    panel = panel_of_sweep(results)
    if not panel.sparse:
        return
    page.add_heading("Accuracy against sparsity", "This run and the finished runs in the folders beside it.")
    lines = [*panel.dense, *panel.sparse]
    page.add_legend([(line.label, _style(line.method)[0]) for line in lines])
    page.add_charts([_chart_of(panel)])


# --- its frontier ---


def _add_frontier(page: Page, path: Path) -> None:
    if not path.is_file():
        return
    found = read_frontier(path)
    left = [100 * (1 - each.sparsity) for each in found.points]
    trained = [(share, each) for share, each in zip(left, found.points, strict=True) if each.trained is not None]
    knee = 100 * (1 - found.knee.sparsity)
    hover = "%{customdata:.4g}% sparse: %{y:.2f}%<extra></extra>"
    traces = [
        {
            "type": "scatter", "mode": "lines+markers", "name": "cut", "x": left,
            "y": [100 * each.test for each in found.points],
            "customdata": [100 * each.sparsity for each in found.points],
            "line": {"color": "var(--accent)", "width": 2.5}, "hovertemplate": f"cut to {hover}",
        },
        {
            "type": "scatter", "mode": "markers", "name": "trained", "x": [share for share, _ in trained],
            "y": [100 * (each.trained or 0) for _, each in trained],
            "customdata": [100 * each.sparsity for _, each in trained],
            "marker": {"color": "var(--warm)", "size": 10, "symbol": "diamond"}, "hovertemplate": f"trained, {hover}",
        },
    ]  # fmt: skip
    line = {"color": "var(--soft)", "width": 1, "dash": "dot"}
    layout = {
        "height": 320,
        "shapes": [{"type": "line", "yref": "paper", "y0": 0, "y1": 1, "x0": knee, "x1": knee, "line": line}],
        "xaxis": {
            "type": "log", "autorange": "reversed", "title": {"text": "sparsity, % (log scale of what is left)"},
            "tickvals": left, "ticktext": [f"{100 * each.sparsity:g}" for each in found.points],
        },
        "yaxis": {"title": {"text": "test accuracy, %"}, "range": [_low([each.test for each in found.points]), 100]},
    }  # fmt: skip
    page.add_heading(
        "One network at every sparsity",
        f"The weights of this network, ordered by {found.order}, cut at many places; only batch-norm statistics are "
        "recalibrated. The gap to the diamonds is what training for a sparsity gains.",
    )
    page.add_legend([("cut", "var(--accent)"), ("trained for its sparsity", "var(--warm)")])
    note = f"dotted: the knee, {found.knee.sparsity:.1%}, the sparsest point within {100 * WITHIN:g} point of the best"
    page.add_charts([Chart("Accuracy against sparsity", [View("", traces, layout)], note, wide=True)])
    page.add_table(*frontier_table(found))


# --- its speed ---


def read_speed(path: Path) -> list[dict[str, Any]]:
    """The cases that `gossamer speed` has measured; none without its file."""
    if not path.is_file():
        return []
    cases = read_object(path, "a measurement of gossamer speed", ": delete it").get("cases")
    if not isinstance(cases, list) or not all(map(_is_case, cases)):
        raise ValueError(f"expected a measurement of gossamer speed in {path}, got something else: delete it")
    return cases


def _is_case(case: object) -> bool:
    return (
        isinstance(case, dict)
        and {"batch", "threads", "rows"} <= case.keys()
        and isinstance(case["rows"], list)
        and all(map(_is_timing, case["rows"]))
    )


def _is_timing(row: object) -> bool:
    if not isinstance(row, dict) or not {"engine", "kind", "note", "median", "lower", "upper"} <= row.keys():
        return False
    times = [row[name] for name in ("median", "lower", "upper")]
    named = all(isinstance(row[name], str) for name in ("engine", "kind"))
    layers = row.get("layers", [])
    if not isinstance(layers, list) or not all(map(_is_layer, layers)):
        return False
    return named and (times == [None] * 3 or all(is_number(each) and 0 <= each < _LONGEST for each in times))


def _is_layer(layer: object) -> bool:
    words, counts = ("name", "kind", "shape", "kernel", "reason"), ("weights", "nonzeros", "multiplications")
    return (
        isinstance(layer, dict)
        and all(isinstance(layer.get(name), str) for name in words)
        and all(is_number(layer.get(name)) for name in counts)
    )


def speed_ratios(case: Mapping[str, Any]) -> dict[str, float]:
    """How many times as fast as each dense engine the sparse one was."""
    ours = next((row["median"] for row in case["rows"] if row["kind"] == "sparse" and row["median"]), None)
    return {
        row["engine"]: row["median"] / ours for row in case["rows"] if ours and row["kind"] == "dense" and row["median"]
    }


def _speed_facts(cases: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, str]]:
    for case in cases:
        if "torch" in (ratios := speed_ratios(case)):
            others = [f"{ratio:.1f}× {engine}" for engine, ratio in ratios.items() if engine != "torch"]
            remark = " and ".join(["that of torch", *others])
            return [("Speed", f"{ratios['torch']:.1f}×", f"{remark}, batch {case['batch']}")]
    return []


def _add_speed(page: Page, cases: Sequence[Mapping[str, Any]]) -> None:
    if not cases:
        return
    page.add_heading("Speed on this machine", "Median milliseconds per batch, all engines taking turns.")
    head = ["engine", "batch", "threads", "ms", "quartiles", "sparse is faster by"]
    rows = []
    for case in cases:
        ratios = speed_ratios(case)
        for row in case["rows"]:
            ran = row["median"] is not None
            rows.append(
                [
                    f"{row['engine']}, {row['kind']}" if ran else f"{row['engine']}: {row['note']}",
                    f"{case['batch']}",
                    f"{case['threads']}",
                    f"{row['median']:.3g}" if ran else "–",
                    f"{row['lower']:.3g} – {row['upper']:.3g}" if ran else "–",
                    f"{ratios[row['engine']]:.2f}×" if row["engine"] in ratios else "–",
                ]
            )
    page.add_table(head, rows)
    _add_kernels(page, cases)


def _add_kernels(page: Page, cases: Sequence[Mapping[str, Any]]) -> None:
    """What gossamer.deploy chose for each layer, at the first batch size."""
    case = cases[0]
    layers = next((row.get("layers", ()) for row in case["rows"] if row["kind"] == "sparse"), ())
    if not layers:
        return
    page.add_heading(
        "Kernels",
        f"What gossamer.deploy runs for each operation at batch {case['batch']}. It has timed them "
        "where there was a choice.",
    )
    rows = [
        [
            each["name"],
            f"{each['kind']} {each['shape']}",
            each["kernel"],
            each["reason"] or "–",
            f"{each['nonzeros']:,} of {each['weights']:,}" if each["weights"] else "–",
            f"{each['multiplications']:,}" if each["multiplications"] else "–",
        ]
        for each in layers
    ]
    page.add_table(["layer", "operation, output", "kernel", "timed", "nonzeros", "multiplications"], rows, words=4)


# --- many runs ---


def page_of_panels(title: str, subtitle: str, headed: Sequence[tuple[str, Panel]]) -> Page:
    """Methods against each other: accuracy against sparsity, a line per method, with its table."""
    page = Page(title, subtitle)
    drawn = {line.label: line for _, panel in headed for line in (*panel.dense, *panel.sparse)}
    page.add_facts(_facts_of_panels([panel for _, panel in headed]))
    if len(drawn) > 1:
        page.add_heading("Methods", "Press a name to hide or show its line in all charts.")
        page.add_keys([(label, label, _style(line.method)[0]) for label, line in drawn.items()])
    for heading, panel in headed:
        page.add_heading(heading, "Mean and standard deviation over seeds.")
        page.add_charts([_chart_of(panel)])
        page.add_table(*_table_of(panel))
    return page


def panel_of_sweep(records: Sequence[Mapping[str, Any]]) -> Panel:
    """The records of a sweep as lines: one for every combination of settings that differ, apart from the seed and what
    asks for a sparsity."""
    sound = [record for record in records if not record.get("diverged")]
    if not sound or not all("accuracy" in record for record in sound):
        raise ValueError(
            "expected runs with an accuracy to draw, got runs that have diverged or have none, such as those of "
            "language models: name others, or leave out --html"
        )
    settings = [_settings(record) for record in sound]
    varying = [name for name in dict.fromkeys(name for each in settings for name in each)
               if len({json.dumps(each.get(name)) for each in settings}) > 1]  # fmt: skip
    groups: dict[tuple[str, str], dict[float, list[float]]] = {}
    for record, own in zip(sound, settings, strict=True):
        method = str(own.get("method", "dense"))
        said = [f"{name.removeprefix('settings.')}={own[name]}" for name in varying if name != "method" and name in own]
        title = METHODS[method].title if method in METHODS else method
        asked = record.get("config", {}).get("sparsity")
        points = groups.setdefault((method, ", ".join([title, *said])), {})
        at = round(100 * (asked if is_number(asked) else record["sparsity"]), 2)
        points.setdefault(at, []).append(100 * record["accuracy"])
    lines = [_line(method, label, points) for (method, label), points in groups.items()]
    sparse = tuple(sorted((each for each in lines if each.method != "dense"), key=lambda each: -max(each.accuracy)))
    at = sorted({each for line in sparse for each in line.sparsity})
    return Panel("", tuple(each for each in lines if each.method == "dense"), sparse, tuple(at))


def _line(method: str, label: str, points: Mapping[float, Sequence[float]]) -> Line:
    at = sorted(points)
    spread = (statistics.stdev(points[each]) if len(points[each]) > 1 else 0.0 for each in at)
    return Line(method, label, tuple(at), tuple(statistics.mean(points[each]) for each in at), tuple(spread))


_NOT_A_LINE = {"seed", "sparsity", "flops", "decay", "leave_at", "device", "data_root", "format"}


def _settings(record: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in record.get("config", {}).items():
        flat |= {f"{name}.{key}": each for key, each in value.items()} if isinstance(value, dict) else {name: value}
    if record.get("method"):
        flat["method"] = record["method"]
    return {name: value for name, value in flat.items() if name not in _NOT_A_LINE}


def _facts_of_panels(panels: Sequence[Panel]) -> list[tuple[str, str, str]]:
    panel = panels[0]
    facts = [("Dense", f"{line.accuracy[0]:.2f}%", "test accuracy") for line in panel.dense[:1]]
    for at in [each for each in panel.sparsity if any(each in line.sparsity for line in panel.sparse)][-3:]:
        best = max((line for line in panel.sparse if at in line.sparsity), key=lambda line: _at(line, at))
        facts.append((f"Best at {at:g}% sparsity", f"{_at(best, at):.2f}%", best.label))
    return facts


def _at(line: Line, sparsity: float) -> float:
    return line.accuracy[line.sparsity.index(sparsity)]


def _style(method: str) -> tuple[str, str, str]:
    """Color, dash and symbol of a method, the same on every page."""
    if method == "dense":
        return "var(--dense)", "dot", "circle"
    style = style_of(method)
    return f"var(--c{style.color})", style.dash, style.symbol


def _chart_of(panel: Panel) -> Chart:
    chart = _rows_chart if len(panel.sparsity) == 1 else _lines_chart
    return replace(chart(panel), wide=True)


def _lines_chart(panel: Panel) -> Chart:
    """The axis of sparsity shows the logarithm of what is left, as 90 and 95 % are farther apart than 50 and 55 %."""
    traces = []
    ends = (1.15 * (100 - panel.sparsity[0]), (100 - panel.sparsity[-1]) / 1.15) if panel.sparsity else (100, 1)
    for line in panel.dense:
        color, dash, _ = _style(line.method)
        traces.append(
            {
                "type": "scatter", "mode": "lines", "name": line.label, "meta": line.label,
                "x": list(ends), "y": [line.accuracy[0]] * 2, "line": {"color": color, "dash": dash, "width": 2},
                "hovertemplate": f"{_safe(line.label)}: {line.accuracy[0]:.2f}%<extra></extra>",
            }
        )  # fmt: skip
    for line in panel.sparse:
        color, dash, symbol = _style(line.method)
        traces.append(
            {
                "type": "scatter", "mode": "lines+markers", "name": line.label, "meta": line.label,
                "x": [100 - each for each in line.sparsity], "y": list(line.accuracy),
                "error_y": {"type": "data", "array": list(line.spread), "thickness": 1, "width": 3, "color": color},
                "line": {"color": color, "dash": dash, "width": 3.5 if line.method == "scl" else 1.5},
                "marker": {"symbol": symbol, "size": 7, "color": color},
                "customdata": list(line.sparsity),
                "hovertemplate": f"{_safe(line.label)}<br>%{{customdata:.4g}}% sparse: %{{y:.2f}}%<extra></extra>",
            }
        )  # fmt: skip
    floor = lowest(panel) if panel.sparse else 0
    lines = (*panel.dense, *panel.sparse)
    best = max(sum(ends) for line in lines for ends in zip(line.accuracy, line.spread, strict=True))
    top = best + 0.05 * (best - floor)
    layout = {
        "height": 420,
        "xaxis": {
            "type": "log", "autorange": "reversed", "title": {"text": "sparsity, % (log scale of what is left)"},
            "tickvals": [100 - each for each in panel.sparsity], "ticktext": [f"{each:g}" for each in panel.sparsity],
        },
        "yaxis": {"title": {"text": "test accuracy, %"}, "range": [floor, min(100, top)]},
    }  # fmt: skip
    return Chart("Accuracy against sparsity", [View("", traces, layout)], "dotted: dense" if panel.dense else "")


def _rows_chart(panel: Panel) -> Chart:
    """At a single sparsity there are no lines to draw: a row per method, the best on top."""
    traces = []
    labels = [line.label for line in panel.sparse][::-1]
    for line in panel.sparse:
        color, _, symbol = _style(line.method)
        traces.append(
            {
                "type": "scatter", "mode": "markers", "name": line.label, "meta": line.label,
                "x": list(line.accuracy), "y": [labels.index(line.label)],
                "error_x": {"type": "data", "array": list(line.spread), "thickness": 1, "color": color},
                "marker": {"symbol": symbol, "size": 9, "color": color},
                "hovertemplate": f"{_safe(line.label)}: %{{x:.2f}}%<extra></extra>",
            }
        )  # fmt: skip
    dense = [
        {
            "type": "line", "yref": "paper", "y0": 0, "y1": 1, "x0": line.accuracy[0], "x1": line.accuracy[0],
            "line": {"color": "var(--dense)", "dash": "dot", "width": 2},
        }
        for line in panel.dense
    ]  # fmt: skip
    lines = [*panel.dense, *panel.sparse]
    layout = {
        "height": 130 + 30 * len(labels),
        "shapes": dense,
        "xaxis": {"title": {"text": "test accuracy, %"}, "range": _around(lines)},
        "yaxis": {"tickvals": list(range(len(labels))), "ticktext": [_safe(each[:40]) for each in labels]},
    }
    note = f"at {panel.sparsity[0]:g}% sparsity{'; dotted: dense' if panel.dense else ''}"
    return Chart("Test accuracy", [View("", traces, layout)], note)


def _around(lines: Sequence[Line]) -> list[float]:
    """An axis of percentages around the points of some lines, which ends at 100 at the latest."""
    ends = [
        mean + sign * spread
        for line in lines
        for mean, spread in zip(line.accuracy, line.spread, strict=True)
        for sign in (-1, 1)
    ]
    margin = 0.05 * (max(ends) - min(ends)) or 0.5
    return [max(0.0, min(ends) - margin), min(100.0, max(ends) + margin)]


def _table_of(panel: Panel) -> tuple[list[str], list[list[str]]]:
    columns = list(panel.sparsity)
    rows = [[line.label, f"{line.accuracy[0]:.2f}", *("–" for _ in columns)] for line in panel.dense]
    for line in panel.sparse:
        cells = {
            at: f"{mean:.2f}{f' ± {spread:.2f}' if spread else ''}"
            for at, mean, spread in zip(line.sparsity, line.accuracy, line.spread, strict=True)
        }
        rows.append([line.label, "–", *(cells.get(at, "–") for at in columns)])
    if not panel.dense:
        rows = [[label, *others] for label, _, *others in rows]
    return ["method", *(["0%"] if panel.dense else []), *(f"{at:g}%" for at in columns)], rows


def _safe(text: str) -> str:
    """Labels of plotly know some HTML."""
    return text.replace("<", "&lt;")


def panels_of_comparison(files: Sequence[Path]) -> list[tuple[str, Panel]]:
    """The records of comparisons with headings: of each network the longest final runs and the longest screening. None
    where the files are no comparisons."""
    found: list[tuple[str, Panel]] = []
    for folder in files:
        if not folder.is_dir() or not _is_comparison(folder):
            continue
        for records in subjects(folder).values():
            for tier in ("final", "screening"):
                for epochs, every in by_epochs(records, tier)[:1]:
                    config = every[0]["config"]
                    heading = f"{config['model']} on {config['data']}, {tier}: {epochs} epochs"
                    found += [(f"{heading}, {panel.title}", panel) for panel in panels(displayed(every)[0])]
    return found


def _is_comparison(folder: Path) -> bool:
    path = next(iter(sorted(folder.glob("*.json"))), None)
    return path is not None and {"tier", "config"} <= read_object(path).keys()
