"""What zeros are worth in engines that are not ours: sizes, estimated cycles, and times of dense against sparse.

    python benchmarks/zeros_in_engines.py --out results/engines

Networks have random masks: nine of ten weights at random positions (90), or two of four consecutive inputs (2:4). The
dense network is the same one with its zeros filled. Packages and programs are written by the exporters of
`gossamer.deployment.exports`, which compare them. On CPUs, each engine runs both networks in turns in one process, one
thread, batch 1; the fastest of the samples counts, because the question is whether any work is saved. It needs
coremltools, executorch[ethos-u], openvino and onnxruntime in one environment (see docs/deploy.md).
"""

import argparse
import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from speed_table import mask_at_random_
from torch import Tensor, nn

from gossamer.deployment import exports
from gossamer.deployment.filled import filled
from gossamer.deployment.quiet import quiet
from gossamer.deployment.runtime.tuning import time_in_turns
from gossamer.deployment.speed import ENGINES
from gossamer.deployment.speed.engines import OURS, Job
from gossamer.deployment.speed.measure import about
from gossamer.lab import models

NPUS = ("ethos-u55-128", "ethos-u85-256")
PACKAGES = ("coremltools", "executorch", "ethos-u-vela")


def two_of_four_(model: nn.Module) -> None:
    """Keep the two largest of four consecutive inputs, at each position of a kernel, where four divides the inputs."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1 and parameter.shape[1] % 4 == 0:
                inputs_last = parameter.movedim(1, -1)
                groups = inputs_last.reshape(-1, 4)
                kept = torch.zeros_like(groups).scatter_(1, groups.abs().topk(2, 1).indices, 1.0)
                parameter.mul_(kept.reshape(inputs_last.shape).movedim(-1, 1))


MASKS: dict[str, Callable[[nn.Module], None]] = {"90": lambda model: mask_at_random_(model, 0.9), "2:4": two_of_four_}


def exported(model: nn.Module, x: Tensor, folder: Path) -> dict[str, Any]:
    """The comparisons of all exporters."""
    written = {
        "coreml": exports.to_coreml(model, x, folder / "m.mlpackage", int8=True),
        "onnx": exports.to_onnx(model, torch.cat((x, x)), folder / "m.onnx"),
        "xnnpack": exports.to_executorch(model, x, folder / "m.pte"),
    }
    for npu in NPUS:
        written[npu] = exports.to_executorch(model, x, folder / "m.pte", target=npu)
    for name, each in written.items():
        print(f"{name}: {each}")
    return {
        name: {"checked": each.checked, "notes": each.notes, "comparisons": [asdict(one) for one in each.comparisons]}
        for name, each in written.items()
    }


def xnnpack(model: nn.Module, x: Tensor, path: Path) -> Callable[..., Any]:
    exports.to_executorch(model, x, path)
    with quiet():
        from executorch.runtime import Runtime

        method = Runtime.get().load_program(path).load_method("forward")
    return lambda *inputs: method.execute(inputs)


def timed(model: nn.Module, x: Tensor, folder: Path, seconds: float) -> dict[str, Any]:
    """Milliseconds of each engine, dense and sparse: the fastest samples."""
    found = {}
    for name in [*(name for name in ENGINES if name != OURS), "xnnpack"]:
        runs = {}
        for kind, network in {"dense": filled(model, 1.0), "sparse": model}.items():
            own = folder / kind
            own.mkdir(exist_ok=True)
            if name == "xnnpack":
                runs[kind] = xnnpack(network, x, own / "m.pte")
            else:
                runs[kind] = ENGINES[name].prepare(Job(network, (x,), 1, own, seconds)).run
        samples = time_in_turns(runs, (x,), seconds, 21)
        dense, sparse = (1e3 * min(samples[kind]) for kind in ("dense", "sparse"))
        found[name] = {"dense": dense, "sparse": sparse, "ratio": dense / sparse}
        print(f"{name}: {dense:.3g} ms dense, {sparse:.3g} ms sparse, ratio {dense / sparse:.2f}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--net", nargs="+", default=["lenet300", "resnet20"], choices=models.names())
    parser.add_argument("--masks", nargs="+", default=list(MASKS), choices=list(MASKS))
    parser.add_argument("--seconds", type=float, default=1.0, help="of timing for each engine; 0 for none")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    for net in arguments.net:
        for mask in arguments.masks:
            print(f"\n{net}, {mask}")
            torch.manual_seed(0)
            model, x = models.create(net).eval(), models.example_input(net, 1)
            MASKS[mask](model)
            with tempfile.TemporaryDirectory() as folder:
                record = {
                    "network": net,
                    "mask": mask,
                    "exports": exported(model, x, Path(folder)),
                    "milliseconds": timed(model, x, Path(folder), arguments.seconds) if arguments.seconds else {},
                    "about": about(PACKAGES, seconds=arguments.seconds),
                }
            path = arguments.out / f"{net}-{mask.replace(':', 'of')}.json"
            path.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n")


if __name__ == "__main__":
    main()
