"""Grouped convolutions: whole groups go, and of the others as much as every group can spare."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from compaction.test_by_hand import assert_same, integers_, whole, zero_
from gossamer import compact


def block(*, padding: int = 0, transposed: bool = False, bias: bool = True) -> nn.Sequential:
    """1×1 to twelve channels, four groups of 3 → 2, 1×1 back; small whole numbers."""
    kind = nn.ConvTranspose2d if transposed else nn.Conv2d
    grouped = kind(12, 8, 3, padding=padding, groups=4, bias=bias)
    return integers_(nn.Sequential(nn.Conv2d(2, 12, 1), nn.ReLU(), grouped, nn.ReLU(), nn.Conv2d(8, 2, 1)))


def sizes(model: nn.Module) -> tuple[int, ...]:
    """Groups, inputs and outputs of the grouped layer, and what the layers beside it have."""
    first, grouped, last = (model.get_submodule(name) for name in "024")
    own = int(grouped.groups), grouped.in_channels, grouped.out_channels  # type: ignore[arg-type]
    return (*own, first.weight.shape[0], last.weight.shape[1])  # type: ignore[return-value, union-attr, index]


def kill_inputs_(model: nn.Sequential, *channels: int) -> None:
    zero_(model[0].weight, list(channels))
    zero_(model[0].bias, list(channels))


def kill_outputs_(model: nn.Sequential, *channels: int) -> None:
    zero_(model[4].weight, slice(None), list(channels))


both_ways = pytest.mark.parametrize("transposed", [False, True])


@both_ways
def test_a_group_that_nobody_reads_goes_with_its_inputs(transposed: bool) -> None:
    model = block(padding=1, transposed=transposed)
    kill_outputs_(model, 2, 3)
    found = compact(model, whole(1, 2, 5, 5))
    assert sizes(found.model) == (3, 9, 6, 9, 6)
    assert_same(found.model, model, whole(4, 2, 5, 5))


@both_ways
def test_inputs_go_where_every_group_loses_as_many(transposed: bool) -> None:
    model = block(padding=1, transposed=transposed)
    kill_inputs_(model, 0, 4, 8, 9, 10)  # one of each group, and two of the last
    found = compact(model, whole(1, 2, 5, 5))
    assert sizes(found.model) == (4, 8, 8, 8, 8)
    told = [each for each in found.report.stayed if each.layer == "0"]
    assert [(each.count, each.why) for each in told] == [
        (1, "all groups of 2 have the same size, and another one needs it")
    ]
    assert_same(found.model, model, whole(4, 2, 5, 5))


@both_ways
def test_outputs_go_where_every_group_loses_as_many(transposed: bool) -> None:
    model = block(transposed=transposed)
    kill_outputs_(model, 1, 2, 5, 6)
    found = compact(model, whole(1, 2, 5, 5))
    assert sizes(found.model) == (4, 12, 4, 12, 4)
    assert_same(found.model, model, whole(4, 2, 5, 5))


def test_a_group_goes_and_the_others_lose_some() -> None:
    model = block(padding=1)
    kill_outputs_(model, 0, 1, 2, 4, 7)
    kill_inputs_(model, 3, 4, 6, 7, 9, 11)
    found = compact(model, whole(1, 2, 5, 5))
    assert sizes(found.model) == (3, 3, 3, 3, 3)
    assert_same(found.model, model, whole(4, 2, 5, 5))


def test_uneven_groups_stay_and_it_is_told_why() -> None:
    model = block(padding=1)
    kill_inputs_(model, 0, 1)
    kill_outputs_(model, 0, 5)
    found = compact(model, whole(1, 2, 5, 5))
    assert sizes(found.model) == (4, 12, 8, 12, 8)
    assert {(each.layer, each.count) for each in found.report.stayed} == {("0", 2), ("2", 2)}
    assert all("all groups of 2 have the same size" in each.why for each in found.report.stayed)


def test_one_group_that_stays_is_an_ordinary_convolution() -> None:
    model = block(padding=1)
    kill_outputs_(model, 0, 1, 2, 3, 6, 7)
    kill_inputs_(model, 7)
    found = compact(model, whole(1, 2, 5, 5))
    assert sizes(found.model) == (1, 2, 2, 2, 2)
    assert_same(found.model, model, whole(4, 2, 5, 5))


@pytest.mark.parametrize("bias", [False, True])
def test_constants_move_into_the_bias(bias: bool) -> None:
    model = block(bias=bias)
    zero_(model[0].weight, [0, 3, 7, 11])  # what is left of these is relu(bias)
    found = compact(model, whole(1, 2, 5, 5))
    assert sizes(found.model) == (4, 8, 8, 8, 8)
    assert found.report.folded == int((model[0].bias[[0, 3, 7, 11]] > 0).sum())
    assert_same(found.model, model, whole(4, 2, 5, 5))


@both_ways
def test_with_padding_one_constant_of_each_group_stands_for_all(transposed: bool) -> None:
    model = block(padding=1, transposed=transposed)
    with torch.no_grad():
        model[0].bias.abs_()
    zero_(model[0].weight, [0, 1, 3, 4, 6, 8, 10, 11])
    found = compact(model, whole(1, 2, 5, 5))
    assert sizes(found.model) == (4, 8, 8, 8, 8)
    assert found.report.folded == 4
    assert_same(found.model, model, whole(4, 2, 5, 5), 1e-15)


def test_inputs_that_another_layer_reads_hold_their_group() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.grouped = nn.Conv2d(2, 6, 1), nn.Conv2d(6, 6, 3, padding=1, groups=3)
            self.last, self.other = nn.Conv2d(6, 2, 1), nn.Conv2d(6, 2, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.relu(self.first(x))
            return self.last(self.grouped(x)) + self.other(x)

    model = integers_(Shared())
    zero_(model.get_parameter("last.weight"), slice(None), [0, 1, 4, 5])
    zero_(model.get_parameter("other.weight"), slice(None), [2, 3, 4, 5])
    found = compact(model, whole(1, 2, 5, 5))
    grouped = found.model.get_submodule("grouped")
    assert (grouped.groups, grouped.in_channels, grouped.out_channels) == (2, 4, 4)
    why = {each.layer: each.why for each in found.report.stayed}
    assert why["grouped"] == "all groups of grouped have the same size, and another one needs it"
    assert_same(found.model, model, whole(4, 2, 5, 5))


def test_groups_on_the_input_of_the_model() -> None:
    """Its channels stay, whatever nobody reads; outputs may go."""
    model = integers_(nn.Sequential(nn.Conv2d(4, 8, 3, groups=2), nn.ReLU(), nn.Conv2d(8, 3, 1)))
    zero_(model[2].weight, slice(None), [0, 1, 2, 6])
    found = compact(model, whole(1, 4, 5, 5))
    first = found.model.get_submodule("0")
    assert (first.groups, first.in_channels, first.out_channels) == (2, 4, 6)
    assert_same(found.model, model, whole(4, 4, 5, 5))
