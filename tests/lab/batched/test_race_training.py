"""Teachers, averages, fresh statistics and weight decay by phase, each against a run alone that does it by hand."""

import copy
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from batched.test_race import CPU, PHASES, RACE, data, network
from methods.test_captured import Watch, as_on_a_gpu
from torch import Tensor, nn
from torch.nn import functional as F

import gossamer
from gossamer.lab.batched import Member, Outcome, run_race
from gossamer.lab.batched.averaging import averaging_rates
from gossamer.lab.batched.compare import Comparison, _name
from gossamer.lab.batched.entries import lanes_of
from gossamer.lab.batched.learner import StackedLearner
from gossamer.lab.batched.race import Running
from gossamer.lab.batched.teaching import distillation
from gossamer.lab.batched.training import NAMES, Training
from gossamer.lab.data.augment import crop_flip, normalise, scale_and_shift
from gossamer.lab.data.batches import epoch_plan
from gossamer.methods import METHODS

STEPS, TOTAL = 8, 8 * 5  # of an epoch, of all epochs


def batch(seed: int, step: int) -> tuple[Tensor, Tensor]:
    images = data()
    scale, shift = (each.double() for each in scale_and_shift(images.mean, images.std))
    plan = epoch_plan(64, seed=seed, epoch=step // STEPS, padding=2, flip=True)
    assert plan.draw is not None
    rows = slice(step % STEPS * RACE.batch_size, (step % STEPS + 1) * RACE.batch_size)
    cropped = crop_flip(images.train.images[plan.order[rows]], plan.draw[rows], padding=2)
    return normalise(cropped, scale, shift, dtype=torch.float64), images.train.labels[plan.order[rows]]


@dataclass
class Alone:
    """A network that is trained by itself with torch's SGD, step by step."""

    seed: int
    sparsity: float | None = None

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        self.net = network().double().train()
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=1.0, momentum=0.9, weight_decay=1e-4)
        self.sparsifier = None
        if self.sparsity is not None:
            self.sparsifier = gossamer.Sparsifier(
                self.net,
                self.optimizer,
                sparsity=self.sparsity,
                total_steps=TOTAL,
                steps_per_epoch=STEPS,
                warmup=PHASES.warmup,
                sparsify=PHASES.sparsify,
                stabilise=PHASES.stabilise,
                min_density=RACE.floor,
            )

    def logits(self, step: int) -> Tensor:
        return self.net(batch(self.seed, step)[0])  # type: ignore[no-any-return]

    def descend(self, loss: Tensor, step: int) -> None:
        self.optimizer.param_groups[0]["lr"] = RACE.rate(step / STEPS)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()

    def accuracy(self) -> float:
        return accuracy(self.net)


def accuracy(net: nn.Module) -> float:
    images = data()
    scale, shift = (each.double() for each in scale_and_shift(images.mean, images.std))
    net.eval()
    said = net(normalise(images.test.images, scale, shift, dtype=torch.float64)).argmax(1)
    return 100 * float((said == images.test.labels).double().mean())


def kept(net: nn.Module) -> tuple[int, ...]:
    return tuple(int((net.get_parameter(name) != 0).sum()) for name in ("0.weight", "3.weight", "8.weight"))


def race(*members: Member) -> tuple[list[Outcome], dict[Member, nn.Module]]:
    found: dict[Member, nn.Module] = {}
    outcomes = run_race(
        RACE, members, data(), network, device=CPU, dtype=torch.float64, keep=lambda m, n: found.update({members[m]: n})
    )
    return outcomes, found


def assert_same_network(ours: nn.Module, theirs: nn.Module) -> None:
    """A race computes its loss in single precision, hence the tolerance."""
    for (name, one), other in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
        if one.is_floating_point():
            torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_distillation_is_the_divergence_of_softened_answers() -> None:
    student, teacher = torch.randn(2, 3, 5, 4, dtype=torch.float64)
    temperature = torch.tensor([1.0, 2.0, 7.0], dtype=torch.float64)
    for row in range(3):
        soft = [np.exp(each[row].numpy() / temperature[row].item()) for each in (teacher, student)]
        p, q = (each / each.sum(1, keepdims=True) for each in soft)
        expected = temperature[row].item() ** 2 * np.mean(np.sum(p * np.log(p / q), axis=1))
        assert float(distillation(student, teacher, temperature)[row]) == pytest.approx(expected)


@pytest.mark.parametrize("teacher", ["dense", "trunk"])
def test_a_taught_run_equals_one_alone_beside_its_teacher(teacher: str) -> None:
    members = [
        Member.of(2, sparsity=0.7),
        Member.of(1, sparsity=0.7, distil=0.6, temperature=3.0, teacher=teacher),
        Member(2, "dense"),
        Member(1, "dense"),
        Member(1, "dense", weight_decay=1e-2),
    ]
    outcomes, networks = race(*members)
    dense, student, trunk = Alone(1), Alone(1, 0.7), None
    for step in range(TOTAL):
        if step == STEPS:
            trunk = copy.deepcopy(dense.net)
        labels = batch(1, step)[1]
        said = dense.logits(step).float()
        answer = student.logits(step).float()
        loss = F.cross_entropy(answer, labels)
        if step >= STEPS:
            assert trunk is not None
            source = said.detach() if teacher == "dense" else trunk(batch(1, step)[0]).detach().float()
            soft = F.kl_div(
                F.log_softmax(answer / 3, 1), F.log_softmax(source / 3, 1), log_target=True, reduction="batchmean"
            )
            loss = 0.4 * loss + 0.6 * 9 * soft
        dense.descend(F.cross_entropy(said, labels), step)
        student.descend(loss, step)
    assert student.sparsifier is not None
    student.sparsifier.finish()
    assert_same_network(networks[members[3]], dense.net)
    assert_same_network(networks[members[1]], student.net)
    assert outcomes[1].connections_by_tensor == kept(student.net)
    assert outcomes[1].accuracy == pytest.approx(student.accuracy())
    untaught, _ = race(Member.of(1, sparsity=0.7))
    assert untaught[0].train_loss != pytest.approx(outcomes[1].train_loss, rel=1e-4)


@pytest.mark.parametrize(
    "settings", [{"average_decay": 0.9}, {"average_tail": 0.3}, {"recalibrate": True}], ids=lambda s: next(iter(s))
)
def test_averages_and_statistics_equal_those_by_hand(settings: dict[str, Any]) -> None:
    members = [Member.of(1, sparsity=0.7), Member.of(1, sparsity=0.7, **settings), Member.of(2, sparsity=0.7)]
    outcomes, networks = race(*members)
    alone = Alone(1, 0.7)
    seen: list[dict[str, Tensor]] = []
    for step in range(TOTAL):
        alone.descend(F.cross_entropy(alone.logits(step).float(), batch(1, step)[1]), step)
        seen.append({name: value.detach().clone() for name, value in alone.net.named_parameters()})
    assert alone.sparsifier is not None
    alone.sparsifier.finish()
    assert_same_network(networks[members[0]], alone.net)
    assert outcomes[0].plain_accuracy is None
    assert outcomes[0].accuracy == outcomes[1].plain_accuracy == pytest.approx(accuracy(copy.deepcopy(alone.net)))
    net = copy.deepcopy(alone.net)
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            values = torch.stack([each[name] for each in seen])
            if "average_tail" in settings:
                mean = values[-round(0.3 * TOTAL) :].mean(0)
            elif "average_decay" in settings:
                mean, mask_phases = values[STEPS], values[STEPS:]
                for number, value in enumerate(mask_phases):
                    rate = max(0.1, 1 / (number + 1))
                    mean = (1 - rate) * mean + rate * value
            else:
                mean = values[-1]
            # Behind masks the average is of values that are not seen here: only what was never removed is compared.
            always = (values[STEPS:] != 0).all(0) if name in ("0.weight", "3.weight", "8.weight") else mean == mean
            ours = networks[members[1]].get_parameter(name).double()
            torch.testing.assert_close(ours[always], mean[always], rtol=1e-4, atol=1e-5)
            assert torch.equal(ours != 0, parameter != 0)
            parameter.copy_(ours)
    norms = [module for module in net.modules() if isinstance(module, nn.BatchNorm2d)]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # the cumulative mean
    net.train()
    for step in range(STEPS):
        net(batch(1, TOTAL + step)[0])
    assert_same_network(networks[members[1]], net)
    assert outcomes[1].accuracy == pytest.approx(accuracy(net))


def test_the_mean_of_a_tail_is_of_its_steps() -> None:
    rates = averaging_rates([Training(average_tail=0.5), Training()], first=[2, 2], total=6)
    assert rates is not None
    torch.testing.assert_close(rates[:, 0], torch.tensor([1, 1, 1, 1, 1 / 2, 1 / 3]))
    torch.testing.assert_close(rates[:, 1], torch.ones(6))
    assert averaging_rates([Training(recalibrate=True)], first=[2], total=6) is None


def test_weight_decay_of_the_last_phase() -> None:
    members = [Member.of(1, sparsity=0.7, finetune_weight_decay=0.05), Member.of(1, sparsity=0.7)]
    _, networks = race(*members)
    for member, decay in zip(members, (0.05, 1e-4), strict=True):
        alone = Alone(1, 0.7)
        for step in range(TOTAL):
            if step == 4 * STEPS:
                alone.optimizer.param_groups[0]["weight_decay"] = decay
            alone.descend(F.cross_entropy(alone.logits(step).float(), batch(1, step)[1]), step)
        assert_same_network(networks[member], alone.net)


def test_weight_decay_that_follows_the_connections() -> None:
    member = Member.of(1, sparsity=0.7, weight_decay=0.02, weight_decay_power=2.0)
    _, networks = race(member)
    alone = Alone(1, 0.7)
    for step in range(TOTAL):
        alone.optimizer.param_groups[0]["weight_decay"] = 0.02 if step < STEPS else 0.02 * 0.3**2
        alone.descend(F.cross_entropy(alone.logits(step).float(), batch(1, step)[1]), step)
    assert_same_network(networks[member], alone.net)


def first_mask_step(members: list[Member]) -> tuple[StackedLearner, Tensor, Tensor]:
    """After one step from the same weights: the learner, the weights before it, and which of them were removed."""
    running = Running(RACE.common, lanes_of(RACE, members, STEPS), data(), network, device=CPU, dtype=torch.float64)
    running.turn(STEPS)
    learner = running.learner
    learner.step += STEPS
    running.feed.begin_epoch(1)
    start = learner.stack.variables.clone()
    running._step()()
    removed = F.pad(~learner.mask[0], (0, start.shape[1] - learner.stack.connections))
    assert int(removed.sum()) > 20
    return learner, start, removed


def test_weight_decay_only_of_what_is_kept() -> None:
    """Runs that start from the same weights differ after one step by the decay that the removed ones were spared."""
    trainings = [Training(removed_weight_decay=factor) for factor in (0.0, 0.25, 1.0)]
    members = [Member(1, "dpf", 0.7, 0.3, training=each) for each in trainings]
    learner, start, removed = first_mask_step(members)
    for row, spared in ((0, 0.3), (1, 0.75 * 0.3)):
        difference = learner.velocity[2] - learner.velocity[row]
        torch.testing.assert_close(difference, torch.where(removed, spared * start[0], 0.0))


def test_phases_and_a_rate_of_its_own_are_those_of_another_race() -> None:
    members = [
        Member.of(1, sparsity=0.7, phases=(0.4, 0.2, 0.4, 0.0)),
        Member.of(1, sparsity=0.7),
        Member.of(1, sparsity=0.7, hold=0.6),
        Member.of(1, sparsity=0.7, restart=0.03),
        Member.of(1, "lottery", 0.7, phases=(0.4, 0.2, 0.2, 0.2), peak_rate=0.02),
        Member.of(1, "rigl", 0.7, peak_rate=0.02),
    ]
    outcomes, _ = race(*members)
    others = (
        (replace(RACE, warmup=2, sparsify=1, stabilise=2, finetune=0), Member.of(1, sparsity=0.7)),
        (RACE, Member.of(1, sparsity=0.7)),
        (replace(RACE, hold=0.6), Member.of(1, sparsity=0.7)),
        (replace(RACE, restart=0.03), Member.of(1, sparsity=0.7)),
        (replace(RACE, warmup=2, sparsify=1, stabilise=1, finetune=1, learning_rate=0.02), Member(1, "lottery", 0.7)),
        (replace(RACE, learning_rate=0.02), Member(1, "rigl", 0.7)),
    )
    for outcome, (shared, member) in zip(outcomes, others, strict=True):
        (alone,) = run_race(shared, [member], data(), network, device=CPU, dtype=torch.float64)
        assert outcome.connections_by_tensor == alone.connections_by_tensor
        assert outcome.train_loss == pytest.approx(alone.train_loss)
        assert outcome.accuracy == alone.accuracy
    assert len({outcome.train_loss for outcome in outcomes}) == 6


def test_the_learning_rate_is_held_and_then_falls_to_zero() -> None:
    held = replace(RACE, warmup=4, sparsify=3, stabilise=1, finetune=2, learning_rate=0.1, hold=0.4)
    assert [held.rate(epoch) for epoch in (0, 3.9, 4, 7, 10)] == pytest.approx([0.1, 0.1, 0.1, 0.05, 0.0])


def test_the_learning_rate_falls_to_zero_in_the_warm_up_and_again() -> None:
    again = replace(RACE, warmup=4, sparsify=3, stabilise=1, finetune=2, learning_rate=0.1, restart=0.04)
    assert [again.rate(epoch) for epoch in (0, 2, 3.9999, 4, 7, 10)] == pytest.approx(
        [0.1, 0.05, 0.0, 0.04, 0.02, 0.0], abs=1e-8
    )


def test_a_race_with_all_of_it_goes_on_after_a_cut(tmp_path: Path) -> None:
    members = [
        Member(1, "dense"),
        Member.of(1, "rigl", 0.7, distil=0.5, average_decay=0.8),
        Member.of(1, sparsity=0.7, distil=0.5, teacher="trunk", average_tail=0.6, removed_weight_decay=0.0),
        Member.of(1, sparsity=0.7, distil=0.5, average_decay=0.9, finetune_weight_decay=0.01),
        Member.of(1, sparsity=0.7, distil=0.3, phases=(0.4, 0.2, 0.2, 0.2), hold=0.4),
    ]

    def fresh() -> Running:
        torch.manual_seed(0)
        return Running(RACE.common, lanes_of(RACE, members, STEPS), data(), network, device=CPU, dtype=torch.float64)

    whole = fresh()
    for epoch in range(RACE.epochs):
        whole.epoch(epoch)
    path = tmp_path / "race.safetensors"
    for epoch in range(RACE.epochs):
        cut = fresh()
        assert cut.go_on_from(path) == epoch
        cut.epoch(epoch)
        cut.save(path)
    assert cut.outcomes() == whole.outcomes()


def test_teachers_that_are_not_there_are_refused() -> None:
    for members, message in (
        ([Member.of(1, distil=0.5), Member(2, "dense")], "expected a dense run of seed 1 with weight_decay=0.0001"),
        ([Member.of(1, distil=0.5, teacher_weight_decay=5e-4), Member(1, "dense")], "weight_decay=0.0005 in the race"),
        ([Member.of(1, "rigl", distil=0.5, teacher="trunk")], "rigl has no trunk"),
        (
            [Member.of(1, distil=0.5, teacher="trunk", phases=(share, 0.2, 0.2, 0.6 - share)) for share in (0.2, 0.4)],
            "expected one warm-up for all runs with teacher='trunk'",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            race(*members)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"distil": 1.5}, "distil: expected a number from 0 to 1, got 1.5"),
        ({"average_decay": 1.0}, "average_decay: expected a number below 1"),
        ({"average_decay": 0.9, "average_tail": 0.1}, "expected average_decay or average_tail, got both"),
        ({"temperature": 0.0}, "temperature: expected a number above 0, got 0.0"),
        ({"phases": (0.5, 0.6, 0.0, 0.0)}, "phases: expected four shares of at least 0 with the sum 1"),
        ({"restart": 0.0}, "restart: expected a learning rate above 0, got 0.0"),
        ({"hold": 1.0}, "hold: expected a number of at least 0 and below 1, got 1.0"),
        ({"teacher": "me"}, "teacher: expected one of dense, trunk, got 'me'"),
    ],
)
def test_what_makes_no_sense_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Member.of(0, **settings)


def test_names_of_settings_do_not_clash_and_defaults_leave_no_trace() -> None:
    for rule in METHODS.values():
        assert not {field.name for field in fields(rule.options)} & set(NAMES)
    assert not set(Member(0).to_dict()) & set(NAMES)
    told = Member.of(0, distil=0.5, mask_lr=0.1).to_dict()
    assert {name: told[name] for name in told if name in NAMES} == {"distil": 0.5}


def test_the_docs_name_every_setting() -> None:
    page = (
        (Path(__file__).parents[3] / "docs" / "methods.md")
        .read_text()
        .partition("## Training settings of a comparison")[2]
    )
    assert [name for name in NAMES if f"`{name}`" not in page] == []


@pytest.mark.parametrize("method", ["dense", "scl", "dpf"])
def test_committed_records_keep_their_names(method: str) -> None:
    comparison = Comparison("resnet20", "cifar10", sparsity=(0.95,))
    folder = Path(__file__).parents[3] / "results" / "race-resnet20"
    for seed in range(3):
        member = Member(seed, method, 0.0 if method == "dense" else 0.95)
        assert (folder / f"resnet20-{method}-{_name(comparison, comparison.race(), [member])}.json").exists()


@pytest.mark.parametrize("last", [STEPS, 4 * STEPS])
def test_a_step_with_all_of_it_can_be_captured(last: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks at no value and moves no tensor, beyond what a race does that has been captured for long."""
    members = [
        Member(1, "dense"),
        Member.of(1, sparsity=0.7, distil=0.5, teacher="trunk", average_tail=0.6, removed_weight_decay=0.0),
        Member.of(1, sparsity=0.7, distil=0.5, average_decay=0.9, finetune_weight_decay=0.01),
    ]
    as_on_a_gpu(monkeypatch)
    seen = []
    for runs in ([Member(1, "dense"), Member(1)], members):
        running = Running(RACE.common, lanes_of(RACE, runs, STEPS), data(), network, device=CPU, dtype=torch.float64)
        for turn in sorted({STEPS, last}):
            running.turn(turn)
        running.feed.begin_epoch(1)
        step, watch = running._step(), Watch()
        step()
        places = {name: tensor.data_ptr() for name, tensor in running._tensors().items()}
        with watch:
            step()
        assert {name: tensor.data_ptr() for name, tensor in running._tensors().items()} == places
        seen.append(watch.seen)
    assert seen[1] == seen[0]
