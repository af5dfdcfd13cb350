"""The hypotheses about learned masks that `screen.py` tries, by stage; what came of each is in docs/lab-book.md."""

from dataclasses import dataclass, field
from typing import Any

from gossamer.lab.batched import Member
from gossamer.lab.results.records import BEFORE

SEEDS = (0, 1, 2)
# What the defaults were before.
FORMER = {name: BEFORE[name] for name in ("removed_gradient", "anchor", "anchor_cap")} | {"mask_lr": 0.01}


@dataclass(frozen=True)
class Hypothesis:
    """One change against the default. The earlier in the list, the sooner it is tried."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    race: dict[str, Any] = field(default_factory=dict)  # what all runs of its race share
    seeds: tuple[int, ...] = SEEDS
    sparsities: tuple[float, ...] = ()  # at these alone

    def members(self, sparsity: float, **usual: Any) -> list[Member]:
        """Learned masks have the `usual` settings where the hypothesis says nothing else."""
        learned = usual if self.settings.get("method", "scl") == "scl" else {}
        asked = {"sparsity": 0.0 if self.settings.get("method") == "dense" else sparsity, **learned, **self.settings}
        return [Member.of(seed, **asked) for seed in self.seeds]


DISTIL = {"distil": 0.5, "temperature": 4.0}
TO_THE_END = {"phases": (0.24, 0.36, 0.4, 0.0)}  # the default is 0.24, 0.36, 0.16, 0.24
HYPOTHESES = (
    Hypothesis("default"),
    Hypothesis("dense", {"method": "dense"}),
    Hypothesis("magnitude", {"method": "dpf"}),
    Hypothesis("distil half", DISTIL),
    Hypothesis("score remembered .99", {"score_memory": 0.99}),
    Hypothesis("curvature 1", {"curvature": 1.0}),
    Hypothesis("masks to the end", TO_THE_END),
    Hypothesis("distil half, better teacher", {**DISTIL, "teacher_weight_decay": 5e-4}),
    Hypothesis("ramp half as long", {"ramp_share": 0.5}),
    Hypothesis("ramp 1.4 times as long", {"ramp_share": 1.4}),
    Hypothesis("cosine ramp", {"ramp": "cosine"}),
    Hypothesis("linear ramp", {"ramp": "linear"}),
    Hypothesis("no weight decay at the end", {"finetune_weight_decay": 0.0}),
    Hypothesis("weight decay 5e-4 at the end", {"finetune_weight_decay": 5e-4}),
    Hypothesis("hysteresis 3", {"hysteresis": 3.0}),
    Hypothesis("scale remembered .99", {"scale_memory": 0.99}),
    Hypothesis("curvature 4", {"curvature": 4.0}),
    Hypothesis("layer scale to the half", {"layer_power": 0.5, "global_power": 0.5}),
    Hypothesis("adam on masks", {"mask_momentum": 0.9, "noise_power": 1.0, "global_power": 0.0, "mask_lr": 3e-4}),
    Hypothesis("mask momentum .9", {"mask_momentum": 0.9}),
    Hypothesis("floor of 1 %", {"floor": 0.01}),
    Hypothesis("no floor", {"floor": 0.0}),
    Hypothesis("longer mask phases", {"phases": (0.16, 0.52, 0.16, 0.16)}),
    Hypothesis("shorter warm-up", {"phases": (0.1, 0.44, 0.18, 0.28)}),
    Hypothesis("peak rate .2", {"peak_rate": 0.2}),
    Hypothesis("label smoothing .1", race={"label_smoothing": 0.1}),
)

RAW, BY_FEATURE = {"feature_power": 0.0, "global_power": 0.0}, {"feature_power": 1.0, "global_power": 0.0}
FROM_ONE = {"start_value": 1.0}
NORMALISATION = (
    Hypothesis("default"),
    Hypothesis("from one", FROM_ONE),
    Hypothesis("by feature, from one", {**BY_FEATURE, **FROM_ONE, "mask_lr": 0.1}),
    *(Hypothesis(f"by feature, rate {rate:g}", {**BY_FEATURE, "mask_lr": rate}) for rate in (0.001, 0.01, 0.1)),
    *(
        Hypothesis(
            f"fixed decay {decay:g}, {name}",
            {**scale, **FROM_ONE, "mask_lr": rate, "anneal": "step", "decay": decay},
            seeds=(0,),
        )
        for name, scale, rate, decays in (
            ("by feature, rate .1", BY_FEATURE, 0.1, (0.001, 0.003, 0.01, 0.03)),
            ("raw, rate .1", RAW, 0.1, (1e-5, 1e-4, 1e-3)),
            ("raw, rate 30", RAW, 30.0, (1e-6, 3e-6, 1e-5, 3e-5)),
        )
        for decay in decays
    ),
)

QUARTER, AVERAGED = {"removed_gradient": 0.25}, {"average_decay": 0.998}
DAMPING = tuple(
    Hypothesis(name, {**AVERAGED, **settings}, seeds=(0, 1))
    for name, settings in (
        ("default", {}),
        ("dense", {"method": "dense"}),
        ("magnitude", {"method": "dpf"}),
        *((f"removed gradient {share:g}", {"removed_gradient": share}) for share in (0.5, 0.25, 0.1, 0.0)),
        ("quarter, peak rate .05", {**QUARTER, "peak_rate": 0.05}),
        ("quarter, distil half", {**QUARTER, **DISTIL}),
        ("quarter, distil most, cool", {**QUARTER, "distil": 0.8, "temperature": 2.0}),
        ("quarter, weight decay 5e-4", {**QUARTER, "weight_decay": 5e-4}),
        ("quarter, removed decay five times", {**QUARTER, "removed_weight_decay": 5.0}),
        ("quarter, masks to the end", {**QUARTER, **TO_THE_END}),
        ("quarter, mask rate .05", {**QUARTER, "mask_lr": 0.05}),
        ("quarter, curvature 1", {**QUARTER, "curvature": 1.0}),
        ("quarter, longer warm-up", {**QUARTER, "phases": (0.36, 0.24, 0.16, 0.24)}),
    )
)
REST = {"removed_gradient": 0.0}
STRONG = {"weight_decay": 5e-4}
FINISHED = {"phases": (0.4, 0.24, 0.12, 0.24), "restart": 0.1}  # a dense network whose learning rate came down to zero
TRUNK = {**FINISHED, "teacher": "trunk", "distil": 0.8, "temperature": 2.0}
BESIDE = {"distil": 0.8, "temperature": 2.0}
TEACHING = tuple(
    Hypothesis(name, settings, seeds=(0, 1))
    for name, settings in (
        ("default", {}),
        ("quarter", QUARTER),
        ("rest", REST),
        ("rest, strong", {**REST, **STRONG}),
        ("rest, restart", {**REST, **FINISHED}),
        ("rest, trunk", {**REST, **TRUNK}),
        ("rest, trunk, strong", {**REST, **TRUNK, **STRONG}),
        ("rest, beside", {**REST, **BESIDE}),
        ("rest, beside, strong", {**REST, **BESIDE, **STRONG, "teacher_weight_decay": 5e-4}),
        ("gradual", {"method": "gradual"}),
        ("gradual, trunk, strong", {"method": "gradual", **TRUNK, **STRONG}),
        ("str", {"method": "str"}),
    )
)
PLAIN = tuple(
    Hypothesis(name, settings, seeds=(0,))
    for name, settings in (
        ("default", {}),
        ("dense", {"method": "dense"}),
        ("rest", REST),
        ("quarter", QUARTER),
        ("rest, by layer", {**REST, "layer_power": 1.0, "global_power": 0.0}),
        ("rest, half by layer", {**REST, "layer_power": 0.5, "global_power": 0.5}),
        ("rest, start by layer", {**REST, "start": "layer_magnitude"}),
        ("rest, weight decay 5e-4", {**REST, "weight_decay": 5e-4}),
        ("magnitude", {"method": "dpf"}),
        ("gradual", {"method": "gradual"}),
        ("str", {"method": "str"}),
    )
)
# The dense network over-fits in long runs and wants 5e-4; at 95 % that costs half a point.
DECAY = tuple(
    Hypothesis(name, {**REST, **settings}, seeds=(0, 1))
    for name, settings in (
        ("default", {}),
        ("strong", STRONG),
        ("strong, with the root of what is left", {**STRONG, "weight_decay_power": 0.5}),
        ("strong, with what is left", {**STRONG, "weight_decay_power": 1.0}),
    )
)
# Masks sink by the noise of their weights, first layers most of all: the more weight decay and the longer the run, the
# worse. With 5e-4 sixty epochs show what a long run does. Here the default has removed weights at rest.
LASTING = {"weight_decay": 5e-4, "weight_decay_power": 0.5}
SHORT = {"anchor": 1e-3, "mask_lr": 3e-3}
SINKING = tuple(
    Hypothesis(name, {**LASTING, **settings}, seeds=(0, 1))
    for name, settings in (
        ("default", REST),
        ("dense", {"method": "dense", "weight_decay_power": 0.0}),
        ("str", {"method": "str"}),
        ("quarter", QUARTER),
        ("rest, anchor 1e-3, rate 1e-3", {**REST, "anchor": 1e-3, "mask_lr": 1e-3}),
        ("quarter, anchor 1e-3, rate 1e-3", {**QUARTER, "anchor": 1e-3, "mask_lr": 1e-3}),
        ("quarter, anchor 1e-3, rate 3e-3", {**QUARTER, **SHORT}),
        ("quarter, anchor 1e-3 to 0, rate 3e-3", {**QUARTER, **SHORT, "anchor_anneal": "cosine"}),
        ("half, anchor 1e-3, rate 3e-3", {"removed_gradient": 0.5, **SHORT}),
        ("quarter, anchor 1e-3, no learning", {**QUARTER, "anchor": 1e-3, "mask_lr": 1e-9}),
        ("quarter, anchor 1e-3, rate 3e-3, beside", {**QUARTER, **SHORT, **BESIDE, "teacher_weight_decay": 5e-4}),
    )
)
# With the cap for sizes of weights: how much of their gradient removed weights should follow, from half to 98 % zeros.
TODAY = {"removed_gradient": 0.5, "anchor": 1e-3, "anchor_cap": 3.0, "mask_lr": 3e-3}
FAST = {**TODAY, "mask_lr": 0.01}
EIGHTH = {"removed_gradient": 0.125}
SHARE = tuple(
    Hypothesis(name, {**LASTING, **settings}, sparsities=sparsities)
    for name, settings, sparsities in (
        ("default", TODAY, ()),
        ("rate .01", FAST, ()),
        ("whole", {**TODAY, "removed_gradient": 1.0}, (0.5, 0.7)),
        ("three quarters", {**TODAY, "removed_gradient": 0.75}, (0.5, 0.7)),
        ("quarter", {**TODAY, **QUARTER}, (0.95, 0.98)),
        ("rate .01, quarter", {**FAST, **QUARTER}, (0.95, 0.98)),
        ("eighth", {**TODAY, **EIGHTH}, (0.98,)),
        ("rate .01, eighth", {**FAST, **EIGHTH}, (0.98,)),
        ("quarter, decay with what is left", {**TODAY, **QUARTER, "weight_decay_power": 1.0}, (0.98,)),
        ("quarter, half the warm-up", {**TODAY, **QUARTER, "phases": (0.12, 0.48, 0.16, 0.24)}, (0.98,)),
    )
)
# With masks that do not sink: is weight decay still to come down with what is left, and what should the end be like?
FOURTH, WHOLE = {"weight_decay_power": 0.25}, {"weight_decay_power": 0.0}
ENDING = tuple(
    Hypothesis(name, {**LASTING, **TODAY, **settings}, sparsities=sparsities)
    for name, settings, sparsities in (
        ("default", {}, (0.7, 0.95, 0.98)),
        ("decay with the fourth root", FOURTH, (0.7,)),
        ("whole decay", WHOLE, (0.7,)),
        ("quarter, decay with the fourth root", {**QUARTER, **FOURTH}, (0.95, 0.98)),
        ("quarter, whole decay", {**QUARTER, **WHOLE}, (0.95, 0.98)),
        ("quarter, anchor comes down", {**QUARTER, "anchor_anneal": "cosine"}, (0.95, 0.98)),
        ("quarter, masks to the end", {**QUARTER, **TO_THE_END}, (0.95, 0.98)),
    )
)
# It is not: with the whole decay, what of the rest holds, and do the peers gain as well?
COMES_DOWN, EVERYWHERE = {"anchor_anneal": "cosine"}, (0.5, 0.7, 0.95, 0.98)
WHOLE_DECAY = (
    *(
        Hypothesis(name, {**LASTING, **TODAY, **WHOLE, **settings}, sparsities=sparsities)
        for name, settings, sparsities in (
            ("whole decay", {}, EVERYWHERE),
            ("quarter, whole decay", QUARTER, EVERYWHERE),
            ("quarter, whole decay, anchor comes down", {**QUARTER, **COMES_DOWN}, EVERYWHERE),
            ("whole decay, anchor comes down", COMES_DOWN, EVERYWHERE),
            ("eighth, whole decay, anchor comes down", {**EIGHTH, **COMES_DOWN}, (0.98,)),
        )
    ),
    Hypothesis("str, whole decay", {**LASTING, **WHOLE, "method": "str"}, sparsities=(0.5, 0.95, 0.98)),
    Hypothesis("autoprune, whole decay", {**LASTING, **WHOLE, "method": "autoprune"}, sparsities=(0.95, 0.98)),
)
STAGES = {
    "screening": HYPOTHESES,
    "normalisation": NORMALISATION,
    "damping": DAMPING,
    "teaching": TEACHING,
    "plain": PLAIN,
    "decay": DECAY,
    "sinking": SINKING,
    "share": SHARE,
    "ending": ENDING,
    "whole-decay": WHOLE_DECAY,
}
