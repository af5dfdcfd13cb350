"""Runs trained side by side give what each gives alone with a Sparsifier and torch's SGD."""

import math
from collections.abc import Callable
from dataclasses import asdict, replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gossamer
from gossamer.lab.batched import Member, Outcome, Race, run_race
from gossamer.lab.batched.entries import lanes_of
from gossamer.lab.batched.race import Running
from gossamer.lab.batched.stack import NetworkStack
from gossamer.lab.data.augment import crop_flip, normalise, scale_and_shift
from gossamer.lab.data.batches import epoch_plan
from gossamer.lab.data.sets import ImageSet, Labelled
from gossamer.lab.models.densenet import DenseNet
from gossamer.lab.models.resnet import BasicBlock, ResNet
from gossamer.lab.models.wide_resnet import WideResNet
from gossamer.methods import METHODS
from gossamer.methods.lottery import rewound
from gossamer.methods.scl import SCLOptions
from gossamer.schedule import Plan, cubic_budget
from gossamer.settings import Phases

CPU = torch.device("cpu")
RACE = Race(warmup=1, sparsify=2, stabilise=1, finetune=1, batch_size=8, learning_rate=0.05, floor=0.02)
PHASES = Phases(warmup="1ep", sparsify="2ep", stabilise="1ep", min_density=RACE.floor)


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


def _rewound(plan: Plan, step: int) -> float:
    return rewound(plan, step, shared=lambda at: RACE.rate(at / 8), peak=RACE.learning_rate)


def alone(member: Member) -> tuple[nn.Module, float]:
    """The same run with nothing stacked, in double precision."""
    images = data()
    torch.manual_seed(member.seed)
    net = network().double().train()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0, momentum=0.9, weight_decay=member.weight_decay)
    steps = len(images.train) // RACE.batch_size
    sparsifier = None
    if member.method != "dense":
        sparsifier = gossamer.Sparsifier(
            net,
            optimizer,
            method=member.method,
            sparsity=member.sparsity if member.decay is None else None,
            decay=member.decay,
            total_steps=RACE.epochs * steps,
            steps_per_epoch=steps,
            seed=member.seed,
            learning_rate=_rewound,
            **{**asdict(member.options), **asdict(PHASES)},
        )
    scale, shift = (each.double() for each in scale_and_shift(images.mean, images.std))
    for epoch in range(RACE.epochs):
        plan = epoch_plan(64, seed=member.seed, epoch=epoch, padding=2, flip=True)
        assert plan.draw is not None
        for step in range(steps):
            rows = slice(step * RACE.batch_size, (step + 1) * RACE.batch_size)
            index = plan.order[rows]
            batch = crop_flip(images.train.images[index], plan.draw[rows], padding=2)
            batch = normalise(batch, scale, shift, dtype=torch.float64)
            optimizer.param_groups[0]["lr"] = RACE.rate((epoch * steps + step) / steps)
            F.cross_entropy(net(batch), images.train.labels[index]).backward()
            optimizer.step()
            optimizer.zero_grad()
    if sparsifier is not None:
        sparsifier.finish()
    net.eval()
    batch = normalise(images.test.images, scale, shift, dtype=torch.float64)
    right = (net(batch).argmax(1) == images.test.labels).double().mean()
    return net, 100 * float(right)


def test_members_equal_their_runs_alone() -> None:
    members = [
        Member.of(seed=1, sparsity=0.8, mask_lr=0.03),
        Member.of(seed=2, sparsity=0.8, mask_lr=0.03),
        Member(seed=1, method="dense"),
        Member.of(seed=1, sparsity=0.5, mask_lr=0.1, mask_momentum=0.5),
    ]
    _all_equal_their_runs_alone(members)


def test_the_papers_settings_equal_the_sparsifier_too() -> None:
    """A fixed λ1, the scale of each feature, other estimators, a rate that falls in a step. (With a constant start the
    floor chooses among equals, and a race has its connections in another order.)"""
    members = [
        Member.of(seed=1, decay=0.4, mask_lr=0.02, anneal="step"),
        Member.of(seed=2, decay=0.2, mask_lr=0.1, scale="batch", estimator="softplus"),
        Member.of(seed=2, sparsity=0.6, mask_lr=3.0, scale="none", anneal="constant"),
        Member.of(seed=1, sparsity=0.7, pruned_grad_scale=0.25),
        Member.of(seed=2, sparsity=0.7, pruned_grad_scale=0.0),
        Member.of(seed=2, sparsity=0.7, mask_decay=0.0),
        Member.of(seed=2, sparsity=0.7, mask_decay=0.05, mask_decay_cap=1.0),
        Member.of(seed=2, sparsity=0.7, mask_decay=0.05, mask_decay_cap=0.0),
        Member.of(seed=1, decay=0.3, mask_decay=0.02, mask_decay_cap=1.0),
        Member.of(seed=1, decay=0.3, mask_decay=0.02, anneal="constant"),
    ]
    fixed = _all_equal_their_runs_alone(members)[:2]
    assert all(0.05 < outcome.sparsity < 0.95 for outcome in fixed)


def test_every_method_is_the_same_alone_with_any_optimizer() -> None:
    """Each method in batched training, and in a Sparsifier with torch's SGD."""
    _all_equal_their_runs_alone([Member(seed=5, method=name, sparsity=0.7) for name in METHODS])


def test_a_race_without_a_trunk_and_one_with_seeds_of_both_kinds() -> None:
    _all_equal_their_runs_alone([Member(seed, name, 0.6) for name in ("rigl", "snip") for seed in (2, 1)])
    mixed = [("l0", 3), ("rigl", 1), ("dense", 1), ("l0", 1), ("rigl", 4)]
    _all_equal_their_runs_alone([Member(seed, name, 0.6) for name, seed in mixed])


def _all_equal_their_runs_alone(members: list[Member]) -> list[Outcome]:
    raced: dict[int, nn.Module] = {}
    outcomes = run_race(RACE, members, data(), network, device=CPU, dtype=torch.float64, keep=raced.__setitem__)
    for number, (member, outcome) in enumerate(zip(members, outcomes, strict=True)):
        net, accuracy = alone(member)
        for ours, theirs in zip(raced[number].parameters(), net.parameters(), strict=True):
            torch.testing.assert_close(
                ours.double(), theirs, rtol=1e-5, atol=1e-6, msg=lambda m, of=member: f"{of}: {m}"
            )
        weights = [net.get_parameter(name) for name in ("0.weight", "3.weight", "8.weight")]
        assert outcome.connections_by_tensor == tuple(int((weight != 0).sum()) for weight in weights), member
        assert outcome.accuracy == pytest.approx(accuracy)
        total = sum(weight.numel() for weight in weights)
        if member.decay is not None:
            continue
        if member.method_type.structured:
            assert abs(outcome.sparsity - member.sparsity) < 0.1
            continue
        kept = total - int(total * (0.0 if member.method == "dense" else member.sparsity) + 0.5)
        assert outcome.sparsity == pytest.approx(1 - kept / total)
    return outcomes


def test_connections_are_counted_where_they_are_not_zero() -> None:
    """In a channel without light RigL grows connections at zero, and no gradient moves them; others grow none."""
    images = replace(data(), mean=(0.0,) * 3)
    images.train.images[:, 2] = 0
    members = [Member.of(5, name, 0.1, **({"distribution": "uniform"} if name == "rigl" else {})) for name in METHODS]
    raced: dict[int, nn.Module] = {}
    outcomes = run_race(RACE, members, images, network, device=CPU, dtype=torch.float64, keep=raced.__setitem__)
    for number, (member, outcome) in enumerate(zip(members, outcomes, strict=True)):
        weights = [raced[number].get_parameter(name) for name in ("0.weight", "3.weight", "8.weight")]
        assert outcome.connections_by_tensor == tuple(int((weight != 0).sum()) for weight in weights), member
        total, left = sum(weight.numel() for weight in weights), sum(outcome.connections_by_tensor)
        assert outcome.sparsity == pytest.approx(1 - left / total)
        kept = total - int(total * (0.0 if member.method == "dense" else 0.1) + 0.5)
        if member.method == "rigl":
            assert kept - 20 < left < kept
        elif not member.method_type.structured:
            assert left == kept


def test_magnitude_keeps_the_largest_weights() -> None:
    members = [Member(seed=3, method="magnitude", sparsity=0.6), Member.of(seed=3, scale="batch")]
    assert members[0].method == "dpf"
    magnitude, learned = run_race(RACE, members, data(), network, device=CPU, dtype=torch.float64)
    assert magnitude.sparsity == pytest.approx(0.6, abs=0.01)
    assert learned.sparsity == pytest.approx(0.95, abs=0.01)


def test_removed_for_good_means_zero_for_good() -> None:
    """Gradual and one-shot pruning step by step: masks only shrink, removed weights are zero and stay zero."""
    members = [Member(seed=3, method="gradual", sparsity=0.6), Member(seed=3, method="one_shot", sparsity=0.6)]
    race = Running(RACE.common, lanes_of(RACE, members, 8), data(), network, device=CPU, dtype=torch.float64)
    race.turn(8 * RACE.warmup)
    step, stack, learner = race._step(), race.learner.stack, race.learner
    learner.step += RACE.warmup * race.feed.steps
    race.feed.begin_epoch(RACE.warmup)
    total, keep = stack.connections, stack.connections - int(stack.connections * 0.6 + 0.5)
    before = torch.ones(2, total, dtype=torch.bool)
    for number in range(8):
        step()
        assert not (learner.mask & ~before).any()
        assert (stack.variables[:, :total][~learner.mask] == 0).all()
        assert int(learner.mask[1].sum()) == keep
        assert int(learner.mask[0].sum()) == cubic_budget((number + 1) / 16, total, keep)
        before = learner.mask.clone()


def test_an_unknown_method_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown method 'sclr': did you mean 'scl'"):
        Member(seed=0, method="sclr")
    with pytest.raises(ValueError, match="unknown setting 'mask_rate' of scl: did you mean 'mask_lr'"):
        Member.of(seed=0, mask_rate=3)
    with pytest.raises(ValueError, match="expected Options as the settings of dpf, got SCLOptions"):
        Member(seed=0, method="dpf", settings=SCLOptions())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sparsity", 1.0),
        ("sparsity", math.nan),
        ("weight_decay", -1e-4),
        ("weight_decay", math.nan),
        ("peak_rate", 0.0),
        ("peak_rate", math.nan),
        ("restart", -1.0),
        ("temperature", math.nan),
        ("teacher_weight_decay", -1.0),
        ("finetune_weight_decay", math.inf),
    ],
)
def test_numbers_that_make_no_sense_are_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"^{name}: expected a .*, got {value}$"):
        Member.of(0, **{name: value})  # type: ignore[arg-type]


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


@pytest.mark.parametrize(
    "make", [classifier, biased, lambda: DenseNet(2, growth=4), dense_net, lambda: WideResNet(10, 1)]
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
