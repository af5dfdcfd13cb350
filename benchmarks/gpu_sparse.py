"""What a GPU makes of zeros: the sparse products that torch has, against dense ones, layer by layer.

    python benchmarks/gpu_sparse.py --layers 6000x1500 4096x4096 --batch 64 1024 --out results/speed-gpu/h200.json
    python benchmarks/gpu_sparse.py --models DIR --batch 1024 --out FILE        # weights of trained networks
    python benchmarks/gpu_sparse.py --device cpu --layers 64x96 --batch 8       # a trial without a GPU

A layer is a matrix of outputs × inputs, a convolution its weight as a matrix, times a batch of columns. Formats:
dense float32 (TF32 off), dense bfloat16; CSR (cuSPARSE) in float32; BSR in blocks of 16 and 32, the blocks that
have a non-zero weight; 2:4, which keeps the two largest of every four weights and so is a different matrix unless
the mask happens to be 2:4: its row shows the fraction of nonzeros it drops. Each product is captured as a CUDA graph
where a replay gives the right result, and timed by events, formats taking turns. Where that is not possible it is
launched call by call, which costs more than many of the kernels: its row has the time of the kernels alone as well.
What a format cannot do is in its row; `--formats` leaves out what brings the device down. The file is written after
every layer.
"""

import argparse
import json
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Collection
from pathlib import Path

import torch
from torch import Tensor

from gossamer.io.sparse_file import load
from gossamer.provenance import commit

Product = Callable[[], Tensor]


def blocks_of(weight: Tensor, size: int) -> Tensor:
    """BSR; sizes are filled up with zeros to whole blocks."""
    rows, columns = (-(-n // size) * size for n in weight.shape)
    filled = weight.new_zeros(rows, columns)
    filled[: weight.shape[0], : weight.shape[1]] = weight
    return filled.to_sparse_bsr((size, size))


def two_of_four(weight: Tensor) -> Tensor:
    """The two largest of every four neighbours, the rest zero."""
    groups = weight.reshape(-1, 4)
    kept = groups.abs().topk(2, 1).indices
    return torch.zeros_like(groups).scatter_(1, kept, groups.gather(1, kept)).reshape(weight.shape)


def products(weight: Tensor, x: Tensor) -> dict[str, Callable[[], tuple[Product, str]]]:
    """By name, how to get a product ready: itself and a remark."""
    half, x_half = weight.bfloat16(), x.bfloat16()

    def csr() -> tuple[Product, str]:
        wide = weight.to_sparse_csr()
        matrix = torch.sparse_csr_tensor(
            wide.crow_indices().int(), wide.col_indices().int(), wide.values(), size=weight.shape
        )
        return lambda: matrix @ x, ""

    def bsr(size: int, values: Tensor, right: Tensor) -> tuple[Product, str]:
        matrix = blocks_of(values, size)
        wide = right.new_zeros(matrix.shape[1], right.shape[1])
        wide[: right.shape[0]] = right
        share = matrix.values().shape[0] * size * size / values.numel()
        return lambda: matrix @ wide, f"{share:.1%} of the matrix lies in blocks that are used"

    def semi_structured() -> tuple[Product, str]:
        from torch.sparse import to_sparse_semi_structured

        kept = two_of_four(half)
        dropped = 1 - int(torch.count_nonzero(kept)) / max(1, int(torch.count_nonzero(half)))
        matrix = to_sparse_semi_structured(kept)
        return lambda: torch.mm(matrix, x_half), f"drops {dropped:.1%} of the nonzeros"

    return {
        "dense float32": lambda: (lambda: weight @ x, ""),
        "dense bfloat16": lambda: (lambda: half @ x_half, ""),
        "CSR float32": csr,
        "BSR 16 bfloat16": lambda: bsr(16, half, x_half),
        "BSR 32 bfloat16": lambda: bsr(32, half, x_half),
        "2:4 bfloat16": semi_structured,
    }


def captured(product: Product, expected: Tensor, device: torch.device) -> tuple[Callable[[], object], str]:
    """The product as a CUDA graph, or as it is where that cannot be captured or computes something else."""
    if device.type != "cuda":
        return product, "eager"
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            product()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            out = product()
        out.zero_()
        graph.replay()
        same = error_of(out, expected) < 0.05
    except RuntimeError:
        torch.cuda.synchronize()
        return product, "eager"

    def replay(read: Product = product, written: Tensor = out) -> None:
        """With what the graph reads and writes: it does not itself keep memory from being given back."""
        graph.replay()

    return (replay, "graph") if same else (product, "eager")


def error_of(out: Tensor, expected: Tensor) -> float:
    difference = (out[: expected.shape[0]].double() - expected).abs().max()
    return float(difference / expected.abs().max().clamp_min(1e-30))


def timed(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Seconds a call."""
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(repeats):
            run()
        return (time.perf_counter() - start) / repeats
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(repeats):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e-3 / repeats


def time_of_kernels(product: Product, repeats: int = 20) -> float:
    """Seconds a call that the device works, without the gaps between kernels."""
    product()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        for _ in range(repeats):
            product()
        torch.cuda.synchronize()
    return 1e-6 * sum(each.self_device_time_total for each in seen.key_averages()) / repeats


def measure(
    name: str, weight: Tensor, batch: int, rounds: int, formats: Collection[str] | None = None
) -> dict[str, object]:
    device = weight.device
    x = torch.randn(weight.shape[1], batch, device=device)
    expected = weight.double() @ x.double()
    runs: dict[str, Callable[[], object]] = {}
    rows: dict[str, dict[str, object]] = {}
    for label, make in products(weight, x).items():
        if formats is not None and label not in formats and not label.startswith("dense"):
            continue
        try:
            product, remark = make()
            error = error_of(product(), expected)
            runs[label], how = captured(product, expected, device)
            rows[label] = {"remark": remark, "run": how, "error": error}
            if how == "eager" and device.type == "cuda":
                rows[label]["microseconds_of_kernels"] = 1e6 * time_of_kernels(product)
        except (RuntimeError, NotImplementedError, ImportError, ValueError, TypeError) as problem:
            rows[label] = {"remark": f"not possible: {str(problem).splitlines()[0][:160]}"}
    repeats = 50 if device.type == "cuda" else 2
    samples: dict[str, list[float]] = {label: [] for label in runs}
    for round_ in range(rounds + 1):  # the first one warms up
        for label, run in runs.items():
            spent = timed(run, device, repeats)
            if round_:
                samples[label].append(spent)
    for label, values in samples.items():
        rows[label]["microseconds"] = 1e6 * statistics.median(values)
    dense = min(float(str(rows[label]["microseconds"])) for label in runs if label.startswith("dense"))
    for label in runs:
        rows[label]["speedup"] = dense / float(str(rows[label]["microseconds"]))
    density = int(torch.count_nonzero(weight)) / max(1, weight.numel())
    print(f"{name}, {weight.shape[0]}x{weight.shape[1]}, {1 - density:.1%} zeros, batch {batch}")
    for label, row in rows.items():
        spent = f"{row['microseconds']:9.1f} µs  {row['speedup']:6.2f} ×" if label in runs else " " * 21
        alone = row.get("microseconds_of_kernels")
        kernels = "" if alone is None else f"(kernels alone {alone:.1f} µs) "
        print(f"  {label:16s} {spent}  {kernels}{row['remark']}")
    return {"layer": name, "shape": list(weight.shape), "sparsity": 1 - density, "batch": batch, "formats": rows}


def random_layers(shapes: list[str], sparsities: list[float]) -> dict[str, Tensor]:
    found = {}
    for shape in shapes:
        rows, columns = (int(n) for n in shape.split("x"))
        for sparsity in sparsities:
            weight = torch.randn(rows, columns)
            found[f"random {shape} at {sparsity:g}"] = weight.masked_fill_(torch.rand(rows, columns) < sparsity, 0)
    return found


def trained_layers(folder: Path, least: int) -> dict[str, Tensor]:
    """The weights of every sparse file in a folder, as matrices, from `least` entries up."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, tensor in load(path).items():
            if tensor.ndim > 1 and tensor.numel() >= least and tensor.is_floating_point():
                found[f"{path.stem}: {name}"] = tensor.float().flatten(1)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", nargs="*", default=[], help="random masks on matrices, outputs x inputs")
    parser.add_argument("--models", type=Path, help="folder of sparse files")
    parser.add_argument("--least", type=int, default=100_000, help="smallest weight of a model that is measured")
    parser.add_argument("--sparsity", type=float, nargs="+", default=[0.9, 0.95, 0.98])
    parser.add_argument("--batch", type=int, nargs="+", default=[64, 1024])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--formats", nargs="+", help="beside the dense ones, by the names in the table; all of them")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--commit", help="where it is not that of a checkout")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    torch.backends.cuda.matmul.allow_tf32 = False
    warnings.filterwarnings("ignore", message=".*(beta|prototype|Sparse invariant checks).*")
    torch.manual_seed(0)
    layers = random_layers(arguments.layers, arguments.sparsity)
    if arguments.models:
        layers |= trained_layers(arguments.models, arguments.least)
    if not layers:
        parser.error("expected --layers or --models with files in it, got neither")
    hardware = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    about = {"torch": torch.__version__, "hardware": hardware, "commit": arguments.commit or commit()}
    rows = []
    for name, weight in layers.items():
        for batch in arguments.batch:
            with torch.no_grad():
                rows.append(measure(name, weight.to(device), batch, arguments.rounds, arguments.formats))
        if arguments.out:
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            arguments.out.write_text(json.dumps({"rows": rows, **about}, indent=1) + "\n")


if __name__ == "__main__":
    main()
