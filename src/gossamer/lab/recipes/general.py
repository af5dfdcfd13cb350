"""The general suite: problems of different kinds, on which methods are compared (`gossamer compare --suite general`).

Each recipe is what a practitioner would train, scaled down to short runs of small networks. Those marked as problems of
development may be used to choose rules and settings; nothing may be chosen on the others. `minutes` estimates one
report pass of a problem on an H200: the dense network, and nine methods at each sparsity, with three seeds.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType

from gossamer.hints import did_you_mean
from gossamer.lab.recipes.recipe import Recipe
from gossamer.lab.training.run import Run

_FROZEN = Path(__file__).with_name("frozen.json")
_MOST = (0.9, 0.95)
_CNN = (0.9, 0.95, 0.98)


@dataclass(frozen=True)
class Problem:
    """A dense run, and the sparsities at which methods are compared on it."""

    name: str
    about: str
    run: Run
    sparsities: tuple[float, ...]
    minutes: float
    validation: int = 5000  # training images held out in tuning; text sets have their own validation part
    development: bool = False

    def sparse_run(self, method: str, sparsity: float, changes: Sequence[str] | None = None) -> Run:
        """The run of a method with some settings (None: its frozen ones), as `Run.with_settings` takes them."""
        changes = frozen_settings().get(method, ()) if changes is None else changes
        return self.run.with_settings([f"method={method}", f"sparsity={sparsity}", *changes])


@cache
def frozen_settings() -> Mapping[str, tuple[str, ...]]:
    """The settings of each method that tuning has chosen (`gossamer tune`); methods without any keep their defaults."""
    if not _FROZEN.is_file():
        return MappingProxyType({})
    return MappingProxyType({name: tuple(each["settings"]) for name, each in json.loads(_FROZEN.read_text()).items()})


_SGD = Run(data="cifar10", batch_size=128, weight_decay=5e-4)
_ADAMW = Run(optimizer="adamw", precision="bf16", lr=1e-3, lr_warmup="0.1run", clip=1.0)
_MNIST = Run(model="lenet300", data="mnist", epochs=10, batch_size=128)

PROBLEMS: tuple[Problem, ...] = (
    Problem(
        "resnet20-cifar10",
        "ResNet-20, CIFAR-10, SGD",
        replace(_SGD, model="resnet20", epochs=50, batch_size=64),
        _CNN,
        minutes=12,
        development=True,
    ),
    Problem("vgg16-cifar10", "VGG-16, CIFAR-10, SGD", replace(_SGD, model="vgg16_cifar", epochs=15, lr=0.05), _CNN, 11),
    Problem(
        "wrn16-4-cifar100",
        "WRN-16-4, CIFAR-100, SGD",
        replace(_SGD, model="wrn16_4", data="cifar100", epochs=20),
        _CNN,
        minutes=14,
    ),
    Problem(
        "mobilenet-cifar100",
        "MobileNet, CIFAR-100, SGD",
        replace(_SGD, model="mobilenet_cifar", data="cifar100", epochs=20),
        _CNN,
        minutes=10,
    ),
    Problem(
        "vit-cifar10",
        "vision transformer, CIFAR-10, AdamW",
        replace(_ADAMW, model="vit", data="cifar10", epochs=30, batch_size=256, weight_decay=0.05, label_smoothing=0.1),
        _MOST,
        minutes=14,
        development=True,
    ),
    Problem(
        "transformer-wikitext2",
        "decoder-only transformer, WikiText-2, AdamW",
        replace(
            _ADAMW,
            model="transformer_lm",
            data="wikitext2",
            epochs=10,
            batch_size=32,
            bptt=128,
            evaluate_every=10,
            weight_decay=0.1,
        ),
        _MOST,
        minutes=18,
    ),
    Problem(
        "lstm-wikitext2",
        "LSTM 2 × 650, WikiText-2, SGD with clipping",
        Run(
            model="lstm_lm",
            model_options={"hidden": 650, "dropout": 0.5},
            data="wikitext2",
            epochs=6,
            evaluate_every=6,
            batch_size=40,
            lr=20.0,
            momentum=0.0,
            weight_decay=1e-6,
            clip=0.25,
        ),
        _MOST,
        minutes=15,
    ),
    Problem(
        "fc-mnist-sgd",
        "LeNet-300-100, MNIST, SGD",
        replace(_MNIST, lr=0.05, weight_decay=5e-4),
        _MOST,
        minutes=1,
        development=True,
    ),
    Problem(
        "fc-mnist-adam",
        "LeNet-300-100, MNIST, Adam",
        replace(_MNIST, optimizer="adam", lr=1e-3, weight_decay=0.0),
        _MOST,
        minutes=4,
        development=True,
    ),
    Problem(
        "minilm-sst2",
        "pretrained MiniLM-L6, SST-2, AdamW",
        replace(
            _ADAMW,
            model="minilm",
            model_options={"pretrained": True},
            data="sst2",
            exclude=("embedding", "classifier"),
            epochs=3,
            evaluate_every=3,
            batch_size=64,
            lr=5e-5,
            weight_decay=0.01,
        ),
        (0.8, 0.9),
        minutes=12,
    ),
    Problem(
        "gru-mnist",
        "GRU, MNIST as sequences of 196 steps, Adam",
        Run(
            model="gru", data="mnist", epochs=10, batch_size=128, optimizer="adam", lr=1e-3, weight_decay=0.0, clip=1.0
        ),
        _MOST,
        minutes=8,
    ),
)
RECIPES = tuple(
    Recipe(problem.name, f"{problem.about}, dense, of the general suite", problem.run) for problem in PROBLEMS
)


def problem_named(name: str) -> Problem:
    for problem in PROBLEMS:
        if problem.name == name:
            return problem
    names = [problem.name for problem in PROBLEMS]
    hint = did_you_mean(name, names, f"the problems are {', '.join(names)}")
    raise ValueError(f"expected a problem of the general suite, got {name!r}: {hint}")
