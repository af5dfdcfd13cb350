"""Every network of the zoo is trained for a few steps, dense and sparse, by the one loop."""

from pathlib import Path

import pytest
import torch

from gossamer.lab import models
from gossamer.lab.data import ImageSet, Labelled, Sentences, SentenceSet, TextSet
from gossamer.lab.models import MODELS, ModelEntry
from gossamer.lab.training import Run, task, train

# Where the full size would take minutes on a CPU, a smaller one of the same build.
SMALLER = {"lstm_lm": {"hidden": 16}, "transformer_lm": {"width": 16, "layers": 2}}
LEFT_OUT = {"map_fit"}  # it fits a map instead of classes; benchmarks/throughput.py takes steps of it
NETWORKS = [entry for entry in MODELS if entry.name not in LEFT_OUT]
LARGE = 10_000_000  # weights; above, one run per network will do
CASES = [
    pytest.param(entry, method, id=f"{entry.name}-{method}")
    for entry in NETWORKS
    for method in ("dense", "scl")
    if method == "scl" or entry.weights < LARGE or entry.name in SMALLER
]


def random_set(entry: ModelEntry) -> ImageSet | TextSet | SentenceSet:
    generator = torch.Generator().manual_seed(0)
    if entry.tokens:
        stream = torch.randint(50, (140,), generator=generator)
        return TextSet(entry.data, stream, stream[:40], stream[:40], tuple(map(str, range(50))))
    if entry.sentences:
        part = Sentences(torch.randint(1, 50, (6, 8), generator=generator), torch.arange(6) % 2)
        return SentenceSet(entry.data, part, part, part, ("no", "yes"))
    # Smaller images will do for ImageNet's networks, but not so small that a batch norm sees one position per image.
    channels, side = entry.input_shape[0], min(64, entry.input_shape[1])
    images = torch.randint(256, (6, channels, side, side), dtype=torch.uint8, generator=generator)
    images_part = Labelled(images, torch.arange(6))
    names = tuple(map(str, range(entry.num_classes)))
    return ImageSet(entry.data, images_part, images_part, names, (0.5,) * channels, (0.25,) * channels)


@pytest.mark.parametrize(("entry", "method"), CASES)
def test_a_few_steps(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    entry: ModelEntry,
    method: str,
) -> None:
    if entry.data == "imagefolder":
        request.getfixturevalue("torchvision_or_skip")
    dataset = random_set(entry)
    monkeypatch.setattr(task.data, "load", lambda name, root=None: dataset)
    options = SMALLER.get(entry.name, {})
    bptt = 20 if entry.tokens else 35
    run = Run(model=entry.name, model_options=options, data=entry.data, batch_size=3, lr=1e-3, bptt=bptt, device="cpu")
    run = run if method == "dense" else run.with_settings(["method=scl", "sparsity=0.9"])
    found = train(run, tmp_path)
    if not options:
        assert found["weights"] == entry.weights
    left = found["weights"] - int(0.9 * found["weights"] + 0.5) if method == "scl" else found["weights"]
    assert 0 <= left - found["nonzeros"] < 10  # of millions of random numbers a few are zero
    assert found["flops"] > 0


def test_the_networks_that_are_left_out_are_the_ones_named() -> None:
    left_out = set(models.names()) - {entry.name for entry in NETWORKS}
    assert left_out == LEFT_OUT
