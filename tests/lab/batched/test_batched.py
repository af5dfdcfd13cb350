"""Runs trained in a batch give what each gives alone with a Sparsifier and an optimizer of torch."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from batched.alone import train_alone
from torch import nn
from torch.nn import functional as F

import gossamer
from gossamer.lab.batched.rows import Outcome
from gossamer.lab.batched.stack import NetworkStack
from gossamer.lab.batched.supported import batched_run
from gossamer.lab.batched.sweeps import train_together
from gossamer.lab.batched.training import BatchedTraining
from gossamer.lab.data import Batches
from gossamer.lab.data.sets import ImageSet, Labelled
from gossamer.lab.models.densenet import DenseNet
from gossamer.lab.models.mobilenet import MobileNet
from gossamer.lab.models.resnet import BasicBlock, ResNet
from gossamer.lab.models.transformer import VisionTransformer
from gossamer.lab.models.wide_resnet import WideResNet
from gossamer.lab.training.run import Run
from gossamer.methods import METHODS
from gossamer.prunable import select
from gossamer.schedule import cubic_budget

CPU = torch.device("cpu")
BATCHED = [name for name, method in METHODS.items() if not method.observes]
PHASES = {"warmup": "1ep", "sparsify": "2ep", "stabilise": "1ep", "min_density": 0.02}
BASE = Run(epochs=5, batch_size=8, lr=0.05, method="scl", sparsity=0.7, settings=PHASES)


def scl(seed: int, sparsity: float | None = 0.7, decay: float | None = None, **settings: float | str) -> Run:
    return replace(BASE, seed=seed, sparsity=sparsity, decay=decay, settings={**PHASES, **settings})


def run_of(method: str, seed: int, sparsity: float | None = 0.7, **settings: float | str) -> Run:
    if method == "dense":
        return replace(BASE, method="dense", sparsity=None, seed=seed, settings={})
    return replace(BASE, method=method, seed=seed, sparsity=sparsity, settings={**PHASES, **settings})


def data() -> ImageSet:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (96, 3, 8, 8), dtype=torch.uint8, generator=generator)
    labels = (images[:, 0].float().mean((1, 2)) > 127).long() + 2 * (images[:, 1, :4].float().mean((1, 2)) > 127).long()
    train, test = Labelled(images[:64], labels[:64]), Labelled(images[64:], labels[64:])
    return ImageSet("toy", train, test, tuple("abcd"), (0.5,) * 3, (0.25,) * 3, padding=2, flip=True)


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 6, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.AvgPool2d(4),
        nn.Flatten(),
        nn.Linear(6, 4),
    )


def accuracy(net: nn.Module) -> float:
    images = data()
    pixels, labels = next(iter(Batches.evaluation(images, images.test, 500, dtype=torch.float64)))
    return float((net.eval()(pixels).argmax(1) == labels).double().mean())


def train(
    runs: list[Run], images: ImageSet | None = None, make_network: Callable[[], nn.Module] = network
) -> list[tuple[Outcome, nn.Module]]:
    return train_together(runs, images or data(), make_network, device=CPU, dtype=torch.float64)


def check_against_runs_alone(runs: list[Run], make_network: Callable[[], nn.Module] = network) -> list[Outcome]:
    trained = train(runs, make_network=make_network)
    for run, (outcome, ours) in zip(runs, trained, strict=True):
        theirs = train_alone(run, data(), make_network)
        for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-6, msg=lambda m, of=run: f"{of}: {m}")
        weights = [weight.parameter for weight in select(theirs)]
        assert outcome.nonzeros_by_tensor == tuple(int((weight != 0).sum()) for weight in weights), run
        assert outcome.accuracy == pytest.approx(accuracy(theirs))
        total = sum(weight.numel() for weight in weights)
        if run.decay is not None:
            continue
        if METHODS[run.method].structured:
            assert abs(outcome.sparsity - (run.sparsity or 0)) < 0.1
            continue
        kept = total - int(total * (run.sparsity or 0.0) + 0.5)
        assert outcome.sparsity == pytest.approx(1 - kept / total)
    return [outcome for outcome, _ in trained]


def test_runs_equal_themselves_alone() -> None:
    check_against_runs_alone([scl(1, 0.8, mask_lr=0.03), scl(2, 0.8, mask_lr=0.03), run_of("dense", 1), scl(1, 0.5)])


def test_the_papers_settings_equal_the_sparsifier_too() -> None:
    """A fixed λ1, the scale of each feature, other estimators, a rate that falls in a step. (With a constant start
    `min_density` chooses among equals, and a batch has its weights in another order.)"""
    runs = [
        scl(1, None, decay=0.4, mask_lr=0.02, anneal="step"),
        scl(2, None, decay=0.2, mask_lr=0.1, scale="batch", estimator="softplus"),
        scl(2, 0.6, mask_lr=3.0, scale="none", anneal="constant"),
        scl(1, pruned_grad_scale=0.25),
        scl(2, pruned_grad_scale=0.0),
        scl(2, mask_decay=0.0),
        scl(2, mask_decay=0.05, mask_decay_cap=1.0),
        scl(2, mask_decay=0.05, mask_decay_cap=0.0),
        scl(1, None, decay=0.3, mask_decay=0.02, mask_decay_cap=1.0),
        scl(1, None, decay=0.3, mask_decay=0.02, anneal="constant"),
    ]
    fixed = check_against_runs_alone(runs)[:2]
    assert all(0.05 < outcome.sparsity < 0.95 for outcome in fixed)


def test_runs_leave_the_sparsify_phase_when_each_has_reached_its_sparsity() -> None:
    """The paper's schedule: with a fixed λ1, the learning rates fall once the target is almost reached."""
    paper: dict[str, float | str] = {"scale": "batch", "mask_lr": 0.1, "anneal": "step", "mask_decay": 0.0}
    runs = [
        replace(scl(seed, None, decay=decay, **{**paper, **more}), schedule="phases", leave_at=leave_at)
        for seed, decay, leave_at, more in [
            (1, 0.4, 0.3, {}),
            (1, 0.4, 0.6, {}),
            (2, 0.1, 0.5, {}),
            (2, 0.4, 0.4, {"mask_decay": 0.05, "anneal": "cosine"}),
            (2, 0.0, 0.9, {}),  # never reaches it
        ]
    ]
    found = check_against_runs_alone(runs)
    left = [outcome.left for outcome in found]
    assert left[-1] is None
    assert len(set(left)) > 3
    assert all(run.leave_at <= outcome.sparsity for run, outcome in zip(runs[:-1], found[:-1], strict=True))
    assert all(len(outcome.sparsity_by_epoch) in (1, 2, 3) for outcome in found)


def test_every_method_is_the_same_in_a_batch_and_alone() -> None:
    # Many scores of these methods are equal, and the first are kept: a batch has its weights in another order.
    tied = ("soft_movement", "platon")
    check_against_runs_alone([run_of(name, 5) for name in BATCHED if name not in tied])


def test_patterns_are_the_same_in_a_batch_and_alone() -> None:
    """Of the tensors, one has four inputs and one has six: what a pattern does not fit is pruned as single weights."""
    wanted = [("scl", "1:2", 0.5), ("scl", "1:2", None), ("sr_ste", "1:4", None), ("gradual", "block:2x2", 0.7)]
    wanted += [("scl", "block:2x2", 0.7), ("scl", "block:2x2", 0.5), ("scl", "row", 0.7), ("dpf", "filter", 0.6)]
    runs = [
        replace(BASE, method=method, pattern=pattern, sparsity=sparsity, seed=seed)
        for seed, (method, pattern, sparsity) in enumerate(wanted)
    ]
    for run, (_, ours) in zip(runs, train(runs), strict=True):
        theirs = train_alone(run, data(), network)
        for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-6, msg=lambda m, of=run: f"{of}: {m}")
        assert gossamer.verify(ours, theirs, pattern=run.pattern)


def test_a_batch_without_warm_ups_and_one_with_seeds_of_both_kinds() -> None:
    check_against_runs_alone([run_of(name, seed, 0.6) for name in ("rigl", "snip") for seed in (2, 1)])
    mixed = [("l0", 3), ("rigl", 1), ("dense", 1), ("l0", 1), ("rigl", 4)]
    check_against_runs_alone([run_of(name, seed, 0.6) for name, seed in mixed])


def test_adam_and_clipping_equal_those_of_torch() -> None:
    """Also where moments are reset, as by RigL, and where a dense warm-up is shared."""
    for optimizer, names in (("adamw", ("dense", "scl", "rigl", "acdc", "feather")), ("adam", ("dense", "scl"))):
        runs = [run_of(name, seed) for name in names for seed in (1, 2)]
        check_against_runs_alone(
            [replace(run, optimizer=optimizer, lr=0.01, weight_decay=0.1, clip=0.5) for run in runs]
        )


def test_transformers_equal_themselves_alone() -> None:
    def transformer() -> nn.Module:
        return VisionTransformer(4, side=8, patch=4, width=8, layers=1, heads=2)

    runs = [replace(run_of(name, 1), optimizer="adamw", lr=0.01) for name in ("dense", "scl", "feather")]
    check_against_runs_alone(runs, transformer)


def test_weight_decay_follows_the_density() -> None:
    check_against_runs_alone(
        [replace(scl(1), weight_decay=0.02, weight_decay_power=2.0), replace(scl(1), weight_decay=0.02)]
    )


def test_weights_are_counted_that_are_not_zero() -> None:
    """In a channel without light RigL grows weights at zero, and no gradient moves them; others grow none."""
    images = replace(data(), mean=(0.0,) * 3)
    images.train.images[:, 2] = 0
    runs = [run_of(name, 5, 0.1, **({"distribution": "uniform"} if name == "rigl" else {})) for name in BATCHED]
    for run, (outcome, net) in zip(runs, train(runs, images), strict=True):
        weights = [weight.parameter for weight in select(net)]
        assert outcome.nonzeros_by_tensor == tuple(int((weight != 0).sum()) for weight in weights), run
        total, left = sum(weight.numel() for weight in weights), sum(outcome.nonzeros_by_tensor)
        assert outcome.sparsity == pytest.approx(1 - left / total)
        kept = total - int(total * (run.sparsity or 0.0) + 0.5)
        if run.method == "rigl":
            assert kept - 20 < left < kept
        elif not METHODS[run.method].structured:
            assert left == kept


def test_pruned_for_good_means_zero_for_good() -> None:
    """Gradual and one-shot pruning step by step: masks only shrink, pruned weights are zero and stay zero."""
    runs = [batched_run(run_of(name, 3, 0.6), 8) for name in ("gradual", "one_shot")]
    training = BatchedTraining(runs, data(), network, device=CPU, dtype=torch.float64)
    training.arrange_rows(8)
    step, stack, optimizer = training._step(), training.optimizer.stack, training.optimizer
    optimizer.step += 8
    training.loader.begin_epoch(1)
    total, keep = stack.prunable, stack.prunable - int(stack.prunable * 0.6 + 0.5)
    before = torch.ones(2, total, dtype=torch.bool)
    for number in range(8):
        step()
        assert not (optimizer.mask & ~before).any()
        assert (stack.variables[:, :total][~optimizer.mask] == 0).all()
        assert int(optimizer.mask[1].sum()) == keep
        assert int(optimizer.mask[0].sum()) == cubic_budget((number + 1) / 16, total, keep)
        before = optimizer.mask.clone()


def classifier() -> nn.Module:
    hidden = [nn.Flatten(), nn.Linear(6 * 16, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4)]
    return nn.Sequential(nn.Conv2d(3, 6, 3, 2, 1, bias=False), nn.BatchNorm2d(6), nn.ReLU(), *hidden)


def biased() -> nn.Module:
    """As LeNet-5: biases of convolutions, no norms, maximum pools; and paddings that grouped convolutions know not."""
    first = [nn.Conv2d(3, 6, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 4, 3, padding="same"), nn.ReLU()]
    last = [nn.Conv2d(4, 5, 3, padding=1, padding_mode="reflect"), nn.Flatten(), nn.Linear(5 * 9, 4)]
    return nn.Sequential(*first, *last)


def dense_net() -> nn.Module:
    return DenseNet(2, growth=4, bottleneck=True, compression=0.5, num_classes=4)


def mobilenet() -> nn.Module:
    return MobileNet(4, ((16, 2), (24, 1)))


@pytest.mark.parametrize(
    "make", [classifier, biased, lambda: DenseNet(2, growth=4), dense_net, lambda: WideResNet(10, 1), mobilenet]
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_stack_of_networks_computes_what_each_computes(dtype: torch.dtype, make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(4)
    networks = [make().double() for _ in range(3)]
    stack = NetworkStack(networks, device=CPU, dtype=dtype)
    images = torch.randn(3, 16, 3, 8, 8, dtype=torch.float64)
    together = stack(images.to(dtype))
    gradients = stack.gradients(together.double().square().sum()).double()
    for row, net in enumerate(networks):
        output = net.train()(images[row])
        expected = torch.autograd.grad(output.square().sum(), list(net.parameters()))
        limit = 1e-9 if dtype == torch.float64 else 0.05
        assert (together[row].double() - output).norm() < limit * output.norm()
        twin = stack.network(row, gradients)
        for ours, theirs in zip(twin.parameters(), expected, strict=True):
            assert (ours - theirs).norm() < limit * sum(each.norm() for each in expected)


def test_a_stack_of_residual_networks_computes_what_each_computes() -> None:
    torch.manual_seed(4)
    networks = [ResNet(8, 10).double() for _ in range(3)]
    stack = NetworkStack(networks, device=CPU, dtype=torch.float64)
    images = torch.randn(3, 4, 3, 32, 32, dtype=torch.float64)
    labels = torch.randint(0, 10, (3, 4))
    gradients = stack.gradients(F.cross_entropy(stack(images).flatten(0, 1), labels.flatten(), reduction="sum"))
    for row, net in enumerate(networks):
        output = net.train()(images[row])
        F.cross_entropy(output, labels[row], reduction="sum").backward()
        twin = stack.network(row, gradients)
        for (name, ours), theirs in zip(twin.named_parameters(), net.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs.grad, rtol=1e-8, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")
        for ours, theirs in zip(twin.buffers(), net.buffers(), strict=True):
            if ours.is_floating_point():  # the count of batches has no use here
                torch.testing.assert_close(ours, theirs)
    stack.template.eval()
    same = stack.on_same_images(images[0])
    for row, net in enumerate(networks):
        torch.testing.assert_close(same[row], net.eval()(images[0]), rtol=1e-8, atol=1e-9)
        assert type(stack.network(row, stack.variables).stage1[0]) is BasicBlock  # type: ignore[union-attr, index]
