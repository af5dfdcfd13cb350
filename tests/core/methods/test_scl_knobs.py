"""The settings of SCL that are to be tried out, each against its formula, written down a second time in NumPy."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from gossamer import budget
from gossamer.methods import METHODS, Request, Timeline, make_options
from gossamer.methods.budgets import layer_magnitude
from gossamer.methods.rule import ramped
from gossamer.methods.scl import SCLOptions
from gossamer.schedule import Plan
from methods.test_captured import LAYOUT as CAPTURED
from methods.test_captured import Watch
from methods.toy import LAYOUT, PLAN, RATE, Array, begin, gradient_like, left, shown, step, top

FEATURES = [*np.split(np.arange(24), 4), *np.split(np.arange(24, 40), 2)]
LAYERS = [np.arange(24), np.arange(24, 40)]
KNOBS: dict[str, dict[str, Any]] = {
    "layer scale": {"layer_power": 0.7, "global_power": 0.0},
    "remembered global scale": {"scale_memory": 0.9},
    "remembered feature scale": {"feature_power": 0.5, "global_power": 0.5, "scale_memory": 0.8},
    "momentum": {"mask_momentum": 0.8},
    "adam": {"mask_momentum": 0.9, "noise_power": 1.0, "second_moment": 0.95, "global_power": 0.0},
    "curvature": {"curvature": 0.8, "second_moment": 0.9},
    "remembered score": {"score_memory": 0.7},
    "hysteresis": {"hysteresis": 0.5},
    "halfway": {"midpoint": 2.0},
    "sign rule": {"weight_power": 0.0},
    "root of the weight": {"weight_power": 0.5},
    "anchored": {"anchor": 0.2, "anchor_cap": 0.0},
    "capped": {"anchor": 0.2, "anchor_cap": 1.0},
    "anchor comes down": {"anchor": 0.3, "anchor_anneal": "cosine"},
    "all": {
        "midpoint": 1.0,
        "anchor": 0.1,
        "curvature": 0.3,
        "score_memory": 0.6,
        "hysteresis": 0.2,
        "scale_memory": 0.9,
        "layer_power": 0.3,
    },
}


class ByHand:
    """One run, one formula after another. A running mean is kept as its list of values."""

    def __init__(self, weights: Array, **settings: Any) -> None:
        self.m, self.options = np.abs(weights), SCLOptions(**settings)
        self.unit, self.level, self.usual = self.m.mean(), 0.0, np.sqrt(np.mean(weights**2))
        self.mask = np.ones(40, dtype=bool)
        self.directions: list[Array] = []
        self.squares: dict[str, list[Array]] = {"feature": [], "layer": [], "global": []}
        self.variables: list[Array] = []

    def direction(self, d: Array) -> Array:
        told = self.options
        self.directions.append(d)
        deviation = np.sqrt(mean([each**2 for each in self.directions], told.second_moment))
        d = mean(self.directions, told.mask_momentum)
        d = d / (deviation + 1e-12) ** told.noise_power
        for kind, parts in (("feature", FEATURES), ("layer", LAYERS), ("global", [np.arange(40)])):
            self.squares[kind].append(np.array([np.mean(d[part] ** 2) for part in parts]))
            sizes = np.sqrt(mean(self.squares[kind], told.scale_memory)) ** getattr(told, f"{kind}_power")
            d = np.concatenate([d[part] / size for part, size in zip(parts, sizes, strict=True)])
        return d

    def step(self, g: Array, w: Array, number: int) -> None:
        told = self.options
        seen = np.where(self.mask, w - told.midpoint * RATE * g, w)
        seen = np.sign(seen) * np.abs(seen) ** told.weight_power
        cosine = 0.5 * (1 + math.cos(math.pi * number / 15))
        self.m = self.m - told.mask_lr * self.direction(g * seen) * cosine
        anchor = told.anchor * (cosine if told.anchor_anneal == "cosine" else 1.0)
        cap = told.anchor_cap * max(self.level, self.usual) if told.anchor_cap else np.inf
        self.m = (1 - anchor) * self.m + anchor * np.minimum(np.abs(w), cap)
        self.level *= 1 - anchor
        self.variables.append(self.m)
        deviation = np.sqrt(mean([each**2 for each in self.directions], told.second_moment))
        score = mean(self.variables, told.score_memory) + told.hysteresis * self.unit * self.mask
        score = score + told.curvature * self.unit * deviation / deviation.mean()
        keep = left(min(1.0, (number + 1) / 10), 40, 16)
        self.mask = top(score[None], keep)[0]
        threshold = np.sort(score)[::-1][keep] if keep < 40 else 0.0
        self.m = self.m - threshold
        self.level += threshold
        self.variables = [each - threshold for each in self.variables]


def mean(values: list[Array], decay: float) -> Array:
    """A running mean with the weights written out."""
    weights = np.array([decay ** (len(values) - 1 - place) for place in range(len(values))])
    return np.tensordot(weights / weights.sum(), np.array(values), axes=1)


@pytest.mark.parametrize("name", KNOBS)
def test_each_setting_is_its_formula(name: str) -> None:
    settings = {"mask_lr": 0.05, **KNOBS[name]}
    rule, weights, timeline = begin("scl", 0.6, **settings)
    plain, _, _ = begin("scl", 0.6, mask_lr=0.05)
    by_hand, others = ByHand(weights.numpy()[0], **settings), weights.clone()
    differs = False
    for number in range(15):
        w, g = weights.numpy()[0].copy(), gradient_like(weights, number).numpy()[0]
        step(rule, weights, timeline, number)
        by_hand.step(g, w, number)
        assert np.array_equal(rule.mask.numpy()[0], by_hand.mask), f"step {number}"
        plain.learn_(gradient_like(weights, number), others)
        differs |= not torch.equal(rule.mask, plain.mask)
        others.copy_(weights)
    assert differs
    assert int(rule.freeze_(weights).sum()) == 16


def test_rows_keep_their_own_settings() -> None:
    """A team in which every row has another setting gives what each gives alone."""
    options = [SCLOptions(mask_lr=0.05), *(SCLOptions(mask_lr=0.05, **knobs) for knobs in KNOBS.values())]
    options += [SCLOptions(removed_gradient=0.3), SCLOptions(ramp="linear"), SCLOptions(start="layer_magnitude")]
    generator = torch.Generator().manual_seed(3)
    weights = torch.randn(1, 40, generator=generator, dtype=torch.float64).repeat(len(options), 1)
    requests = [Request(0.6, 7, each) for each in options]

    def timeline(rows: int) -> Timeline:
        return Timeline(PLAN, rows=rows, device=weights.device, dtype=weights.dtype, epoch=2)

    clock = timeline(len(options))
    together = METHODS["scl"](LAYOUT, requests, clock, weights, floor=0.05)
    clocks = [timeline(1) for _ in options]
    alone = [
        METHODS["scl"](LAYOUT, [request], own, weights[:1], floor=0.05)
        for request, own in zip(requests, clocks, strict=True)
    ]
    for number in range(15):
        gradient = gradient_like(weights[:1], number).repeat(len(options), 1)
        together.learn_(gradient, weights)
        clock.clock += 1
        for row, (rule, own) in enumerate(zip(alone, clocks, strict=True)):
            given = gradient_like(weights[:1], number)
            rule.learn_(given, weights[:1])
            own.clock += 1
            assert torch.equal(given[0], gradient[row])
            assert torch.equal(rule.mask[0], together.mask[row]), (row, number)


def test_from_one_start_the_rate_of_masks_changes_nothing() -> None:
    """Where the budget is exact and nothing else has a part only the order counts: section 42 of the lab book."""

    def masks(rate: float, **settings: Any) -> list[torch.Tensor]:
        rule, weights, timeline = begin("scl", 0.6, mask_lr=rate, removed_gradient=1.0, **settings)
        found = []
        for number in range(15):
            step(rule, weights, timeline, number)
            found.append(rule.mask.clone())
        return found

    def same(**settings: Any) -> bool:
        return all(map(torch.equal, masks(0.1, **settings), masks(3.2, **settings)))

    for scale in ({"global_power": 0.0}, {"global_power": 0.0, "feature_power": 1.0}):
        assert same(start_value=1.0, anchor=0.0, anneal="step", **scale)
        assert not same(anchor=0.0, anneal="step", **scale)  # from |w̃|
        assert not same(start_value=1.0, anchor=0.01, anneal="step", **scale)


def test_noise_makes_masks_sink_and_the_halfway_weight_takes_that_out() -> None:
    """Weights at rest in a parabola, pulled to and fro by noise: SGD with momentum, written out here."""
    draw, curvature, rate, momentum = np.random.default_rng(0), 0.5, 0.02, 0.9
    for best in (0.0, 0.3):
        w, v = np.full(4000, best), np.zeros(4000)
        sinking, halfway, noise = 0.0, 0.0, 0.0
        for number in range(3000):
            g = curvature * (w - best) + draw.standard_normal(4000)
            if number >= 1000:
                sinking, noise = sinking + np.mean(g * w) / 2000, noise + np.mean(g**2) / 2000
                halfway += np.mean(g * (w - rate * g / 2 / (1 - momentum))) / 2000
            v = momentum * v + g
            w = w - rate * v
        assert sinking == pytest.approx(rate / 2 / (1 - momentum) * noise, rel=0.1)
        assert abs(halfway) < 0.1 * sinking


@pytest.mark.parametrize(("asked", "above"), [(0.25, 0.0), (0.25, 0.5), (None, 0.0)])
def test_the_gradient_of_what_is_removed_is_damped(asked: float | None, above: float) -> None:
    rule, weights, timeline = begin("scl", 0.6, removed_gradient=asked, removed_gradient_above=above)
    share = 0.4**0.4 if asked is None else asked
    for number in range(12):
        removed = ~rule.mask.numpy()[0]
        given, gradient = step(rule, weights, timeline, number)
        factor = np.where(removed & (removed.sum() >= above * 40), share, 1.0)
        np.testing.assert_array_equal(gradient.numpy()[0], given.numpy()[0] * factor)
    assert int(removed.sum()) == 24


def test_ramps_have_their_shapes_and_lengths() -> None:
    assert [ramped("linear", share, 40, 16) for share in (0.0, 0.25, 0.5, 1.0)] == [40, 34, 28, 16]
    assert [ramped("cosine", share, 40, 16) for share in (0.0, 1 / 3, 0.5, 1.0)] == [40, 34, 28, 16]
    assert [ramped("at_once", share, 40, 16) for share in (0.0, 1.0)] == [16, 16]
    for share, shape in ((0.5, "linear"), (1.5, "cosine"), (1.0, "cubic")):
        rule, weights, timeline = begin("scl", 0.6, ramp=shape, ramp_share=share)
        for number in range(15):
            step(rule, weights, timeline, number)
            done = min(1.0, (number + 1) / (10 * share))
            rest = {"linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done)), "cubic": (1 - done) ** 3}[shape]
            assert int(rule.mask.sum()) == math.floor(16 + 24 * rest + 0.5)
    with pytest.raises(ValueError, match=r"expected the target to be met in the 15 steps .* got a ramp of 16 steps"):
        begin("scl", 0.6, ramp_share=1.6)


def test_a_start_that_knows_its_layers() -> None:
    weights = torch.cat([torch.full((1, 24), 4.0), torch.linspace(-1, 1, 16)[None]], dim=1)
    start = layer_magnitude(weights, LAYOUT)[0]
    second = weights[0, 24:].square().mean().sqrt()
    whole = weights.square().mean().sqrt()
    torch.testing.assert_close(start[:24], whole.repeat(24))
    torch.testing.assert_close(start[24:], weights[0, 24:].abs() / second * whole)
    rule, drawn, _ = begin("scl", 0.6, start="layer_magnitude")
    torch.testing.assert_close(rule.state()["score"], layer_magnitude(drawn, LAYOUT))


def test_a_floor_of_its_own() -> None:
    weak = {}
    for floor in (None, 0.1):
        _, weights, timeline = begin("scl", 0.8)
        weights[:, 24:] = 1e-6
        settings = make_options(METHODS["scl"], {"floor": floor, "mask_lr": 0.0})
        rule = METHODS["scl"](LAYOUT, [Request(0.8, 7, settings)], timeline, weights, floor=0.0)
        for number in range(15):
            step(rule, weights, timeline, number)
        assert int(rule.mask.sum()) == 8
        weak[floor] = int(rule.mask[:, 24:].sum())
    assert weak == {None: 0, 0.1: 2}  # a tenth of 16, rounded up


@pytest.mark.parametrize("name", [*KNOBS, "damping"])
def test_a_step_can_be_captured(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "_one_by_one", lambda matrix: False)  # as on a GPU
    knobs = KNOBS.get(name, {"removed_gradient": 0.5, "removed_gradient_above": 0.3})
    rule, weights, timeline = begin("scl", 0.6, 0.7, layout=CAPTURED, plan=Plan(0, 20, 5, 5), floor=0.05, **knobs)
    state = {**rule.state(), "masks": rule.mask}
    assert all(tensor.is_contiguous() for tensor in state.values())
    places = {key: tensor.data_ptr() for key, tensor in state.items()}
    for number in range(25):
        gradient, out, watch = gradient_like(weights, number), torch.empty_like(weights), Watch()
        with watch:
            rule.show_(weights, out)
            rule.learn_(gradient, weights)
            rule.settle_(weights)
            timeline.clock += 1
        assert watch.seen == [], f"step {number}"
        weights.sub_(RATE * gradient)
        assert {key: tensor.data_ptr() for key, tensor in {**rule.state(), "masks": rule.mask}.items()} == places
    assert torch.equal(shown(rule, weights), torch.where(rule.mask, weights, 0.0))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ramp": "steep"}, "ramp: expected one of cubic, linear, cosine, at_once, got 'steep'"),
        ({"start": "zero"}, "start: expected one of magnitude, layer_magnitude, got 'zero'"),
        ({"score_memory": 1.0}, "score_memory: expected a decay from 0 to below 1, got 1.0"),
        ({"removed_gradient": -0.5}, "removed_gradient: expected a number from 0 to 1, or none, got -0.5"),
        ({"anchor": 1.0}, "anchor: expected a decay from 0 to below 1, got 1.0"),
        ({"anchor_cap": 0.5}, "anchor_cap: expected a number of at least 1, or 0, got 0.5"),
        ({"weight_power": -1.0}, "weight_power: expected a number of at least 0, and 1 where l2 is not 0, got -1.0"),
        (
            {"weight_power": 0.5, "l2": 0.1},
            "weight_power: expected a number of at least 0, and 1 where l2 is not 0, got 0.5",
        ),
        ({"ramp_share": 0.0}, "ramp_share: expected a number above 0, got 0.0"),
    ],
)
def test_what_makes_no_sense_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SCLOptions(**settings)


@pytest.mark.parametrize("settings", KNOBS.values(), ids=KNOBS)
def test_a_rule_that_began_with_other_weights_goes_on_from_a_state(settings: dict[str, Any]) -> None:
    """As after a cut: what was measured where masks began, such as the size of the weights, is part of the state."""
    whole, weights, timeline = begin("scl", 0.6, **settings)
    for number in range(4):
        step(whole, weights, timeline, number)
    other, there, clock = begin("scl", 0.6, seed=1, **settings)
    other.learn_(gradient_like(there, 9), there * 3.0)
    there.copy_(weights)
    clock.clock.copy_(timeline.clock)
    for name, tensor in other.state().items():
        tensor.copy_(whole.state()[name])
    for number in range(4, 12):
        step(whole, weights, timeline, number)
        step(other, there, clock, number)
    assert torch.equal(there, weights)
    assert all(torch.equal(tensor, whole.state()[name]) for name, tensor in other.state().items())
