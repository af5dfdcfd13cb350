"""How fast sparse networks run on a CPU, against the best dense engine of the same run.

    python benchmarks/speed_table.py --net resnet20 --out results/speed           # random masks at 90, 95, 98 %
    python benchmarks/speed_table.py --models DIR --out results/speed             # trained networks, as sparse files

DIR has sparse files that know their network (by `network=` of gossamer.save, or by a name such as
resnet20-95.safetensors), or folders of runs. Of a language model the second LSTM layer is measured alone as well. One
thread, engines taking turns in one process, medians. Random masks are uniform: every layer has the same share of zeros,
so FLOPs fall with the weights. Trained masks keep the layers that cost most denser, and speed follows FLOPs: their
record has both.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from gossamer.deployment.speed import ENGINES, SpeedReport, measure
from gossamer.lab import models
from gossamer.lab.model_files import open_network
from gossamer.lab.models.minilm import minilm
from gossamer.lab.models.transformer import vit

Example = Callable[[int], Tensor]
PARTS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")  # of a layer of nn.LSTM


class OneLstm(nn.Module):
    """The LSTM layer of the language model alone: 1,500 units over 35 steps, time first."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(1500, 1500)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.lstm(x)[0]
        return out


def layer_of(network: nn.LSTM, layer: int) -> OneLstm:
    """One layer of a trained LSTM."""
    alone = OneLstm()
    ours = {f"lstm.{name}_l0": network.get_parameter(f"{name}_l{layer}") for name in PARTS}
    alone.load_state_dict({name: parameter.detach() for name, parameter in ours.items()})
    return alone


def pictures(name: str) -> tuple[nn.Module, Example]:
    shape = models.entry(name).input_shape
    return models.create(name), lambda batch: torch.randn(batch, *shape)


NETWORKS: dict[str, tuple[str, Callable[[], tuple[nn.Module, Example]], tuple[int, int]]] = {
    "resnet20": ("ResNet-20", lambda: pictures("resnet20"), (1, 64)),
    "vgg16_cifar": ("VGG-16, CIFAR", lambda: pictures("vgg16_cifar"), (1, 64)),
    "lstm": ("LSTM 1500, 35 steps", lambda: (OneLstm(), lambda batch: torch.randn(35, batch, 1500)), (1, 20)),
    "lenet300": ("MLP 784-300-100-10", lambda: pictures("lenet300"), (1, 64)),
    "densenet40": ("DenseNet-40", lambda: pictures("densenet40"), (1, 64)),
    "minilm": (
        "MiniLM-L6, 64 tokens",
        lambda: (minilm(), lambda batch: torch.randint(1, 30_000, (batch, 64))),
        (1, 16),
    ),
    "vit_tiny": (
        "ViT-tiny, 64 patches",
        lambda: (vit(layers=12), lambda batch: torch.randn(batch, 3, 32, 32)),
        (1, 16),
    ),
}


def mask_at_random_(model: nn.Module, sparsity: float) -> None:
    """Prune every weight tensor of a layer to exactly the same density, but no embeddings and positions."""
    torch.manual_seed(0)
    layers = [module for module in model.modules() if not isinstance(module, nn.Embedding)]
    weights = [p for layer in layers for name, p in layer.named_parameters(recurse=False) if name.startswith("weight")]
    with torch.no_grad():
        for parameter in weights:
            if parameter.ndim > 1:
                gone = torch.randperm(parameter.numel())[: round(sparsity * parameter.numel())]
                parameter.view(-1)[gone] = 0


def trained(folder: Path) -> list[Path]:
    """Files in a folder, and the sparse models of runs in it."""
    return sorted([*folder.glob("*.safetensors"), *folder.glob("*/model.sparse.safetensors")])


def write(report: SpeedReport, masks: str, title: str, path: Path, command: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    values = {"title": title, "masks": masks, "command": command, **report.to_dict()}
    path.write_text(json.dumps(values, indent=1, allow_nan=False) + "\n")
    print(report)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--net", choices=list(NETWORKS), nargs="*", default=[], help="networks with random masks")
    parser.add_argument("--models", type=Path, help="folder of sparse files with trained masks")
    parser.add_argument("--sparsity", type=float, nargs="+", default=[0.9, 0.95, 0.98])
    parser.add_argument(
        "--batch", type=int, nargs="+", help="default: 1 and 64, for the LSTM 1 and 20, for transformers 1 and 16"
    )
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=list(ENGINES))
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--cpu-time", action="store_true", help="seconds of this process, for a busy machine")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    settings = {"engines": arguments.engines, "seconds": arguments.seconds, "cpu_time": arguments.cpu_time}
    flags = " --cpu-time" if arguments.cpu_time else ""
    for net in arguments.net:
        title, build, batches = NETWORKS[net]
        for sparsity in arguments.sparsity:
            model, example = build()
            mask_at_random_(model, sparsity)
            report = measure(model, example, name=net, batches=arguments.batch or batches, **settings)
            percent = f"{100 * sparsity:g}"
            command = f"python benchmarks/speed_table.py --net {net} --sparsity {sparsity:g}{flags} --out results/speed"
            write(report, "random", title, arguments.out / f"{net}-random-{percent}.json", command)
    for path in trained(arguments.models) if arguments.models else ():
        name = path.name.removesuffix(".safetensors").removesuffix(".sparse")
        name = path.parent.name if name == "model" else name
        net = name.split("-")[0]
        stored = open_network(path, net if net in models.names() else None)
        title = NETWORKS[stored.name][0] if stored.name in NETWORKS else stored.name
        batches = arguments.batch or ((1, 20) if stored.tokens else (1, 64))
        report = measure(stored.model, stored.example, name=stored.name, batches=batches, **settings)
        command = "python benchmarks/speed_table.py --models DIR --out results/speed"
        write(report, "trained", title, arguments.out / f"{name}.json", command)
        lstm = getattr(stored.model, "lstm", None)
        if isinstance(lstm, nn.LSTM) and lstm.hidden_size == 1500:
            title, build, batches = NETWORKS["lstm"]
            report = measure(layer_of(lstm, 1), build()[1], name="lstm", batches=batches, **settings)
            write(report, "trained", title, arguments.out / f"{name.replace(stored.name, 'lstm')}.json", command)


if __name__ == "__main__":
    main()
