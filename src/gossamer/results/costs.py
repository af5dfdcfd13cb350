"""What training and inference cost: times, ratios, memory."""

import json
from collections.abc import Sequence
from pathlib import Path

from gossamer.results.records import Record, read, table


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


def side_by_side(root: Path) -> str:
    record = json.loads((root / "side-by-side" / "h200.json").read_text())
    rows = [
        [str(row["runs"]), f"{row['dense_ms']:.2f}", f"{row['sparse_ms']:.2f}", f"{row['sparse_epoch_s']:.3f}",
         f"{row['peak_gib']:.1f}"]
        for row in record["rows"]
    ]  # fmt: skip
    return "\n\n".join(
        [
            "## Runs side by side",
            f"{record['network']}, batch 64, CIFAR's sizes, bf16, one {record['hardware']}: milliseconds for a step of "
            f"all runs together, and seconds an epoch and run in the phase where masks learn (`{record['command']}`).",
            table(["runs", "dense step, ms", "sparse step, ms", "s an epoch and run", "peak memory, GiB"], rows),
        ]
    )


def throughput_rows(record: Record) -> list[list[str]]:
    """One row a network; what was not measured, or has failed, is a dash."""

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
            cell(found.get("side_by_side", {}), "epoch_s", ".3f"),
        ]
        for name, found in record["networks"].items()
    ]


def throughput(root: Path) -> str:
    """Seconds an epoch of every network, where they have been measured."""
    path = root / "throughput" / "h200.json"
    if not path.is_file():
        return ""
    record = json.loads(path.read_text())
    runs = {
        found["side_by_side"]["runs"]
        for found in record["networks"].values()
        if "epoch_s" in found.get("side_by_side", {})
    }
    together = f"{max(runs)} runs side by side" if runs else "side by side"
    head = ["network", "batch", "fastest mode", "s an epoch", "a second", "sparsifier", "peak memory, GiB", together]
    return "\n\n".join(
        [
            "## Speed of every network",
            f"Sparse training in the phase where masks learn, one {record['hardware']}, in the fastest of the modes "
            "tried (all of them are in the run file); the share of the sparsifier is what a sparse step takes longer "
            "than a dense one in the same mode; the last column is seconds an epoch and run, bf16. Random data of the "
            f"right shapes, no files read (`{record['command']}`).",
            table(head, throughput_rows(record)),
        ]
    )


def speed_rows(records: Sequence[Record]) -> list[list[str]]:
    """One row a network, kind of mask, sparsity and batch size."""
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
    records = read(root / "speed")
    machines = ", ".join(sorted({record["about"]["hardware"] for record in records}))
    head = ["network", "masks", "zeros", "FLOPs saved", "batch", "best dense, ms", "dense int8, ms", "gossamer, ms"]
    return "\n\n".join(
        [
            "## Speed on a CPU",
            "Milliseconds of a call, one thread, medians of engines that take turns in one process: torch, onnxruntime "
            "and OpenVINO (torch.compile, int8 where given), and `gossamer.deploy`. The speed-up is over the best "
            "dense float32 engine of that run. Break-even: the share of FLOPs saved from which on sparse is faster. "
            f"Random masks are uniform over layers. {machines} "
            "(`python benchmarks/speed_table.py --net NAME --out results/speed`).",
            table([*head, "speed-up", "break-even"], speed_rows(records)),
        ]
    )
