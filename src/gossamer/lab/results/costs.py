"""What training and inference cost: times, ratios, memory."""

import json
from collections.abc import Sequence
from pathlib import Path

from gossamer.lab.results.records import Record, read_objects, table


def overhead_rows(root: Path) -> list[list[str]]:
    places = {"cpu": "2 CPU cores", "h200": "H200"}
    rows = []
    for name, place in places.items():
        record = json.loads((root / "step-overhead" / f"{name}.json").read_text())
        for case in record["rows"]:
            rows += [[case["case"], place, scale, f"{ratio:.2f}"] for scale, ratio in case["ratios"].items()]
    return rows


def overhead(root: Path) -> str:
    return "\n\n".join(
        [
            "## Cost of a step",
            "Time of a sparse training step over a dense one, in the phase where masks learn and the budget is solved "
            "in every step; interleaved, median of the ratios of neighbours (`python benchmarks/step_overhead.py`, "
            "`--device cuda`). Extra memory: 2.25 × the bytes of the weights (w̃, m̃ and the mask).",
            table(["network", "machine", "scale of the mask gradient", "sparse / dense"], overhead_rows(root)),
        ]
    )


def batched(root: Path) -> str:
    record = json.loads((root / "batched" / "h200.json").read_text())
    rows = [
        [str(row["runs"]), f"{row['dense_ms']:.2f}", f"{row['sparse_ms']:.2f}", f"{row['sparse_epoch_s']:.3f}",
         f"{row['peak_gib']:.1f}"]
        for row in record["rows"]
    ]  # fmt: skip
    return "\n\n".join(
        [
            "## Batched runs",
            f"{record['network']}, batch 64, CIFAR's sizes, bf16, one {record['hardware']}: milliseconds for a step of "
            f"all runs together, and seconds per epoch and run in the phase where masks learn (`{record['command']}`).",
            table(["runs", "dense step, ms", "sparse step, ms", "s per epoch and run", "peak memory, GiB"], rows),
        ]
    )


def throughput_rows(record: Record) -> list[list[str]]:
    """One row per network; a dash stands for what was not measured, or has failed."""

    def cell(entry: Record, key: str, form: str) -> str:
        value = entry.get(key)
        return "–" if value is None else format(value, form)

    return [
        [
            name,
            str(found["batch_size"]),
            cell(found.get("alone", {}), "mode", ""),
            cell(found.get("alone", {}), "epoch_s", ".2f"),
            f"{cell(found.get('alone', {}), 'per_second', ',.0f')} {found['unit']}",
            cell(found.get("alone", {}), "sparsifier_share", ".1%"),
            cell(found.get("alone", {}), "peak_gib", ".2f"),
            cell(found.get("batched", {}), "epoch_s", ".3f"),
            cell(found.get("batched", {}), "peak_gib", ".2f"),
        ]
        for name, found in record["networks"].items()
    ]


def _earlier(record: Record) -> str:
    """The networks that were measured at another commit than the rest."""
    of: dict[str, list[str]] = {}
    for name, found in record["networks"].items():
        for key in ("alone", "batched"):
            commit = found.get(key, {}).get("commit")
            if commit is not None and name not in of.setdefault(commit, []):
                of[commit].append(name)
    earlier = [f"{', '.join(names)} at {commit}" for commit, names in sorted(of.items())]
    return f", but {'; '.join(earlier)}" if earlier else ""


def throughput(root: Path) -> str:
    """Seconds per epoch of every network that has been measured."""
    path = root / "throughput" / "h200.json"
    if not path.is_file():
        return ""
    record = json.loads(path.read_text())
    runs = {found["batched"]["runs"] for found in record["networks"].values() if "epoch_s" in found.get("batched", {})}
    together = f"{max(runs)} runs batched" if runs else "batched"
    head = ["network", "batch", "fastest mode", "s per epoch", "per second", "sparsifier", "peak memory, GiB"]
    head += [together, "their peak memory, GiB"]
    return "\n\n".join(
        [
            "## Speed of every network",
            f"Sparse training in the phase where masks learn, one {record['hardware']}, commit {record['commit']}, in "
            f"the fastest of the modes tried (all of them are in the run file){_earlier(record)}; the share of "
            "the sparsifier is the part of a sparse step by which it is longer than a dense one in the same mode; the "
            "column of batched runs is seconds per epoch and run, bf16: where it is not below that of one run "
            "alone, as with wide networks, a sweep saves nothing but the warm-up that its runs share. Random data of "
            f"the right shapes, no files read (`{record['command']}`).",
            table(head, throughput_rows(record)),
        ]
    )


def speed_rows(records: Sequence[Record]) -> list[list[str]]:
    """One row per network, kind of mask, sparsity and batch size."""
    rows = []
    for record in sorted(records, key=lambda each: (each["title"], each["masks"], each["sparsity"])):
        zeros, saved = (f"{100 * record[key]:.1f} %" for key in ("sparsity", "flops_sparsity"))
        for case in record["cases"]:
            times = {row["engine"]: row["median"] for row in case["rows"]}
            best = case["best_dense"]
            gain = f"{case['speedup']:.1f} ×" if case["speedup"] >= 1.03 else "no gain"
            even = "–" if case["break_even"] is None else f"{100 * case['break_even']:.0f} %"
            quick = _milliseconds(times.get("onnxruntime int8"))
            row = [record["title"], record["masks"], zeros, saved, str(case["batch"])]
            rows.append(
                [*row, f"{_milliseconds(times[best])} ({best})", quick, _milliseconds(times["gossamer"]), gain, even]
            )
    return rows


def _milliseconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"


def speed(root: Path) -> str:
    records = read_objects(root / "speed")
    machines = ", ".join(sorted({record["about"]["hardware"] for record in records}))
    busy = sorted({record["title"] for record in records if "clock" in record["about"]["settings"]})
    process = f"Process time, as the machine was busy: {'; '.join(busy)}. " if busy else ""
    head = ["network", "masks", "zeros", "FLOPs saved", "batch", "best dense, ms", "dense int8, ms", "gossamer, ms"]
    return "\n\n".join(
        [
            "## Speed on a CPU",
            "Milliseconds of a call, one thread, medians of engines that take turns in one process: torch, onnxruntime "
            "and OpenVINO (torch.compile, int8 where given), and `gossamer.deploy`. The speed-up is over the best "
            "dense float32 engine of that run. Break-even: the share of FLOPs saved from which on sparse is faster. "
            f"Random masks are uniform over layers. {process}{machines} "
            "(`python benchmarks/speed_table.py --net NAME --out results/speed`).",
            table([*head, "speed-up", "break-even"], speed_rows(records)),
        ]
    )


def product_rows(records: Sequence[Record], formats: Sequence[str]) -> list[list[str]]:
    """One row per layer and batch; microseconds of each format, with a star where launching is part of them."""

    def cell(found: Record) -> str:
        if "microseconds" not in found:
            return "–"
        return f"{found['microseconds']:.0f}" + ("" if found["run"] == "graph" else " *")

    return [
        [row["layer"], "×".join(map(str, row["shape"])), f"{100 * row['sparsity']:.1f} %", str(row["batch"])]
        + [cell(row["formats"].get(name, {})) for name in formats]
        for record in records
        for row in record["rows"]
    ]


def wins(records: Sequence[Record]) -> str:
    """The number of rows in which a captured sparse product beats the best dense one, and its largest gain."""
    gains = []
    for row in (row for record in records for row in record["rows"]):
        times = {name: each["microseconds"] for name, each in row["formats"].items() if each.get("run") == "graph"}
        dense = [time for name, time in times.items() if name.startswith("dense")]
        sparse = [time for name, time in times.items() if not name.startswith("dense")]
        if dense and sparse:
            gains.append(min(dense) / min(sparse))
    faster = [gain for gain in gains if gain > 1]
    most = f", by at most {100 * (max(faster) - 1):.0f} %" if faster else ""
    return f"the best is faster than the best dense one in {len(faster)} of {len(gains)} rows{most}"


def products_on_a_gpu(root: Path) -> str:
    """Sparse products that torch has for a GPU, if they have been measured."""
    records = read_objects(root / "speed-gpu")
    if not records:
        return ""
    formats = list(dict.fromkeys(name for record in records for row in record["rows"] for name in row["formats"]))
    machines = ", ".join(sorted({record["hardware"] for record in records}))
    return "\n\n".join(
        [
            "## Sparse products on a GPU",
            f"Microseconds of a product of a layer's weight and a batch of columns, one {machines}, by formats that "
            "torch has: CSR (cuSPARSE), BSR in blocks, 2:4. As a CUDA graph, or launched call by call where that is "
            "not possible (*: mostly the time of launching, so nothing is said about their kernels). Of the captured "
            f"sparse products {wins(records)} (`python benchmarks/gpu_sparse.py`).",
            table(["layer", "outputs × inputs", "zeros", "batch", *formats], product_rows(records, formats)),
        ]
    )
