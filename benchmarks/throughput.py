"""How fast every network of the zoo trains on one GPU: alone in the best mode, and side by side with others.

    python benchmarks/throughput.py --out results/throughput/h200.json
    python benchmarks/throughput.py --out results/throughput/h200.json --again             # after a change
    python benchmarks/throughput.py --tiny --out tiny.json --networks resnet20 lstm_lm     # a check on a CPU

A mode is a precision (float32 or bf16), a memory layout, eager or compiled, launched kernel by kernel or captured as
one CUDA graph. For each network a few sensible modes are tried with the sparse step, in the phase where masks learn and
the budget is solved in every step; in the fastest one the dense and the sparse step are then timed in turns, and their
difference is the share of the sparsifier. Batch size, optimizer and clipping are those of the network's recipe (batch
64 and the defaults where it has none). Small images and text are random, but gathered and augmented as in training; a
batch of ImageNet's size stays on the device, so decoding files is not counted.

The file is written after every measurement. The same command goes on where it was stopped; what has failed is noted,
and not tried again. Compiling takes longest and comes last, while `--minutes` last. `--again` takes the fastest mode of
each network to still be the fastest: that one (if it is compiled, with the same that is not) and the runs side by side
are measured anew, network by network while there is time; what is not keeps its figures, with the commit they are of.
How long it takes to compile is told by the longest start: torch keeps what it has compiled.
"""

import argparse
import functools
import gc
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from throughput_modes import write_modes
from throughput_steps import Case, Trained, case_of, modes_of

from gossamer.lab import models
from gossamer.lab.models.digits_cnn import QUICK_START
from gossamer.lab.training.modes import Mode
from gossamer.provenance import commit
from gossamer.schedule import Phase

EPOCH = {"mnist": 60_000, "cifar10": 50_000, "imagefolder": 1_281_167, "wikitext2": 2_088_628}  # images or words
ZOO = [name for name in models.names() if name != QUICK_START]  # which trains in seconds anywhere
COMPILED_FIRST = ("resnet20", "resnet50", "vgg16_cifar", "wrn28_10", "efficientnet_b0", "vgg16", "densenet40")
COMPILE_SECONDS = 45  # left of the time, or nothing is compiled any more
ROUNDS = 5  # of dense and sparse steps in turns

Record = dict[str, Any]


# --- measuring ---


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_a_step(step: Callable[[], None], seconds: float, device: torch.device) -> float:
    """The mean over as many steps as fit, from an idle device to an idle device."""

    def timed(count: int) -> float:
        synchronise(device)
        start = time.perf_counter()
        for _ in range(count):
            step()
        synchronise(device)
        return (time.perf_counter() - start) / count

    pilot = timed(2)
    return timed(max(2, min(5_000, int(seconds / pilot))))


def warm_up(step: Callable[[], None], device: torch.device) -> float:
    """Seconds until steps are what they will be: algorithms chosen, code compiled, graph captured."""
    start = time.perf_counter()
    for _ in range(6):
        step()
    synchronise(device)
    return time.perf_counter() - start


def try_mode(case: Case, mode: Mode, seconds: float) -> Record:
    """The sparse step in one mode."""
    before = memory_now(case.device)
    step = Trained(case, mode, sparse=True)
    start_up = warm_up(step, case.device)
    took = seconds_a_step(step, seconds, case.device)
    return {"sparse_ms": 1e3 * took, "start_up_s": start_up, "peak_gib": peak_memory(case.device, before)}


def memory_now(device: torch.device) -> int:
    """What is taken before a measurement: compiled code of others may hold on to some. The peak is forgotten."""
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated(device)


def peak_memory(device: torch.device, before: int) -> float | None:
    return (torch.cuda.max_memory_allocated(device) - before) / 2**30 if device.type == "cuda" else None


def alone(case: Case, mode: Mode, seconds: float) -> Record:
    """The dense and the sparse step in turns."""
    steps = {name: Trained(case, mode, sparse=name == "sparse") for name in ("dense", "sparse")}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        warm_up(step, case.device)
    for _ in range(ROUNDS):
        for name, step in steps.items():
            times[name].append(seconds_a_step(step, seconds / ROUNDS, case.device))
    dense, sparse = (statistics.median(times[name]) for name in ("dense", "sparse"))
    per_epoch = EPOCH.get(case.entry.data)
    return {
        "dense_ms": 1e3 * dense,
        "sparse_ms": 1e3 * sparse,
        "sparsifier_share": max(0.0, 1.0 - dense / sparse),
        "per_second": case.samples / sparse,
        "epoch_s": None if per_epoch is None else sparse * per_epoch / case.samples,
    }


def batched(case: Case, runs: int) -> Record:
    """Runs of one network trained together as one stacked network; bf16, one CUDA graph."""
    from batched_steps import seconds_a_step as stacked  # the benchmark beside this one

    steps = 60 if case.entry.weights < 5_000_000 else 15
    dense, _ = stacked(case.entry.name, runs, steps, Phase.WARMUP, case.device)
    before = memory_now(case.device)
    sparse, _ = stacked(case.entry.name, runs, steps, Phase.SPARSIFY, case.device)
    peak, epoch = peak_memory(case.device, before), sparse * EPOCH[case.entry.data] / 64 / runs
    return {"runs": runs, "dense_ms": 1e3 * dense, "sparse_ms": 1e3 * sparse, "epoch_s": epoch, "peak_gib": peak}


# --- the record ---


class Book:
    """What has been measured so far, written to its file after every entry."""

    def __init__(self, path: Path, about: Record) -> None:
        self._path = path
        self.record: Record = json.loads(path.read_text()) if path.is_file() else {"networks": {}}
        if self.record.get("hardware", about["hardware"]) != about["hardware"]:
            raise SystemExit(
                f"{path} is of {self.record['hardware']}, not of {about['hardware']}: choose another --out"
            )
        before = self.record.get("commit", about.get("commit"))
        if before != about.get("commit"):
            for entry in (each for found in self.record["networks"].values() for each in entries(found)):
                entry.setdefault("commit", before)
        self.record = {**self.record, **about}

    def forget_the_fastest(self, name: str) -> None:
        """Have what the table shows of a network measured anew, if it is of an earlier commit."""
        found = self.record["networks"].get(name, {})
        if "commit" not in found.get("alone", {}):
            return  # never measured, or at this commit
        fastest = found.pop("alone").get("tried")
        found.pop("batched", None)
        for mode in {fastest, not_compiled(fastest)} & found["tried"].keys():
            forgotten = found["tried"].pop(mode)
            if "start_up_s" in forgotten:
                found.setdefault("starts", {})[mode] = forgotten["start_up_s"]

    def start_up(self, name: str) -> float:
        """How long it took to compile a network, in seconds, where that is known."""
        found = self.record["networks"].get(name, {})
        starts = [each.get("start_up_s", 0.0) for each in found.get("tried", {}).values()]
        return max([COMPILE_SECONDS, *starts, *found.get("starts", {}).values()])

    def of(self, case: Case) -> Record:
        unit = "words" if case.entry.tokens else "images" if len(case.entry.input_shape) == 3 else "vectors"
        fresh = {"batch_size": case.run.batch_size, "unit": unit, "tried": {}}
        found: Record = self.record["networks"].setdefault(case.entry.name, fresh)
        return found

    def note(self, into: Record, key: str, label: str, measure: Callable[[], Record]) -> None:
        """Measure, and write down the outcome or the error, unless that was done already."""
        if key in into:
            return
        start = time.perf_counter()
        try:
            into[key] = measure()
        except Exception as error:  # whatever it is, the other networks are measured too
            lines = str(error).splitlines() or [""]
            into[key] = {"error": f"{type(error).__name__}: {lines[0]}"}
        torch.compiler.reset()  # first, as compiled code holds on to memory
        gc.collect()
        self.write()
        print(f"{label}: {told(into[key])} ({time.perf_counter() - start:.1f} s)", flush=True)
        if torch.cuda.is_available():
            try:
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
            except RuntimeError as error:  # some errors end all work of a process on its GPU
                raise SystemExit(f"the GPU is lost to this process ({error}): run the same command again") from error

    def write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._path.with_name(f".{self._path.name}.part")
        temporary.write_text(json.dumps(self.record, indent=1) + "\n")
        temporary.replace(self._path)


def entries(found: Record) -> list[Record]:
    """All that was measured of a network."""
    shown = [found[key] for key in ("alone", "batched") if key in found]
    return [*shown, *found["tried"].values()]


def not_compiled(mode: str | None) -> str | None:
    """The mode that a compiled one is compared with."""
    return None if mode is None else mode.replace(", compiled", "")


def told(entry: Record) -> str:
    if "error" in entry:
        return str(entry["error"])
    dense = f"dense {entry['dense_ms']:.3f} ms, " if "dense_ms" in entry else ""
    return f"{dense}sparse {entry['sparse_ms']:.3f} ms"


def best_mode(case: Case, tried: Record) -> Mode | None:
    """The mode with the fastest sparse step."""
    modes = (mode for flag in (False, True) for mode in modes_of(case.entry, compiled=flag))
    every = {str(mode): mode for mode in modes}
    good = {name: entry["sparse_ms"] for name, entry in tried.items() if name in every and "error" not in entry}
    return every[min(good, key=lambda name: good[name])] if good else None


def measure_alone(book: Book, case: Case, modes: list[Mode], seconds: float) -> None:
    found, name = book.of(case), case.entry.name
    for mode in modes:
        if mode.capture and case.device.type != "cuda":
            continue
        book.note(found["tried"], str(mode), f"{name}, {mode}", lambda mode=mode: try_mode(case, mode, 0.3 * seconds))
        entry, before = found["tried"][str(mode)], found.get("starts", {}).get(str(mode), 0.0)
        if "start_up_s" in entry:
            entry["start_up_s"] = max(entry["start_up_s"], before)
    best = best_mode(case, found["tried"])
    if best is None:
        return
    if found.get("alone", {}).get("tried") == str(best):
        return
    fresh: Record = {}
    book.note(fresh, "alone", f"{name}, alone", lambda: alone(case, best, seconds))
    if "error" not in fresh["alone"]:
        fresh["alone"] |= {"mode": str(best), "peak_gib": found["tried"][str(best)]["peak_gib"]}
    kept = {} if "error" not in fresh["alone"] else found.get("alone", {})  # a slower mode that works is better
    found["alone"] = {**fresh["alone"], **kept, "tried": str(best)}
    book.write()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=ZOO, choices=models.names(), metavar="NAME")
    parser.add_argument("--seconds", type=float, default=1.0, help="of dense and sparse steps each, in the best mode")
    parser.add_argument(
        "--runs", type=int, default=8, help="side by side, of networks for CIFAR and MNIST; 0 leaves them out"
    )
    parser.add_argument("--minutes", type=float, default=5.5, help="after which nothing new is begun")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--modes", type=Path, help="the table of modes to bring up to date, training/modes.json")
    parser.add_argument("--again", action="store_true", help="the fastest mode and runs side by side, in OUT")
    parser.add_argument("--commit", help="where it is not that of a checkout")
    parser.add_argument("--tiny", action="store_true", help="small batches on a CPU, to see that it works")
    arguments = parser.parse_args()
    device = torch.device("cpu" if arguments.tiny else arguments.device)
    seconds = 0.05 if arguments.tiny else arguments.seconds
    until = time.monotonic() + 60 * arguments.minutes
    on_gpu = device.type == "cuda"
    torch.backends.cudnn.benchmark = on_gpu
    about = {
        "command": "python benchmarks/throughput.py --out results/throughput/h200.json",
        "hardware": torch.cuda.get_device_name(device) if on_gpu else "CPU",
        "torch": torch.__version__,
        "commit": arguments.commit or commit(),
    }
    book = Book(arguments.out, about)
    cases = {name: case_of(name, device, tiny=arguments.tiny) for name in arguments.networks}

    def in_time(needed: float = 0.0) -> bool:
        return time.monotonic() + needed < until

    def measure(name: str, *, compiled: bool) -> None:
        measure_alone(book, cases[name], modes_of(cases[name].entry, compiled=compiled), seconds)

    def measure_together(name: str) -> None:
        case = cases[name]
        stackable = case.entry.data in ("cifar10", "mnist") and name != "indrnn"  # which a sweep refuses
        if on_gpu and arguments.runs and stackable:
            stacked = functools.partial(batched, case, arguments.runs)
            book.note(book.of(case), "batched", f"{name}, batched", stacked)

    if arguments.again:
        for name in cases:
            if in_time(book.start_up(name) if on_gpu else 0.0):
                book.forget_the_fastest(name)
                measure(name, compiled=False)
                measure_together(name)
                if on_gpu:
                    measure(name, compiled=True)
    else:
        for name in cases:
            if in_time():
                measure(name, compiled=False)
        for name in cases:
            if in_time():
                measure_together(name)
        first = [name for name in COMPILED_FIRST if name in cases]
        for name in dict.fromkeys([*first, *cases]):
            if on_gpu and in_time(book.start_up(name)):
                measure(name, compiled=True)
    if arguments.modes is not None:
        write_modes(arguments.modes, book.record, cases)
    left = [name for name, case in cases.items() if "alone" not in book.of(case)]
    book.write()
    if left:
        print(f"not measured: {', '.join(left)}; out of time (run the same command again), or failed (see the file)")


if __name__ == "__main__":
    main()
