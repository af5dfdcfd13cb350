"""Features killed by hand: what has to go goes, what has to stay stays, and the report says why."""

from __future__ import annotations

import io
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gossamer import compact
from gossamer.deployment.compaction import CompactionError, UntraceableError
from gossamer.lab import models

torch.manual_seed(0)


def integers_(model: nn.Module) -> nn.Module:
    """Small whole numbers, so that sums do not depend on their order and equal means equal."""
    with torch.no_grad():
        for each in model.parameters():
            each.copy_(torch.randint(1, 4, each.shape) * (2 * torch.randint(0, 2, each.shape) - 1))
    return model.double().eval()


def whole(*shape: int) -> Tensor:
    return torch.randint(-3, 4, shape).double()


@torch.no_grad()
def zero_(tensor: Tensor, *index: Any) -> None:
    tensor[index] = 0


def shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(each.shape) for name, each in model.named_parameters()}


def assert_same(found: nn.Module, model: nn.Module, x: Tensor, tolerance: float = 0.0) -> None:
    with torch.no_grad():
        expected = model(x)
        assert expected.abs().max() > 0
        difference = (found(x) - expected).abs().max() / expected.abs().max()
    assert difference <= tolerance


def test_zeros_go_exactly_and_the_model_is_left_alone() -> None:
    model = integers_(nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3)))
    zero_(model[0].weight, [1, 4])
    zero_(model[0].bias, [1, 4])
    zero_(model[4].weight, slice(None), 2)
    before = shapes(model)
    found = compact(model, whole(2, 5))
    assert shapes(found.model) == {
        **{"0.weight": (6, 5), "0.bias": (6,), "2.weight": (5, 6), "2.bias": (5,)},
        **{"4.weight": (3, 5), "4.bias": (3,)},
    }
    assert_same(found.model, model, whole(64, 5))
    assert shapes(model) == before
    assert found.report.folded == 0


def test_death_spreads() -> None:
    """The unit that only a dead unit reads is dead too."""
    model = integers_(nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 2)))
    zero_(model[4].weight, slice(None), 0)
    zero_(model[2].weight, slice(1, None), 3)
    found = compact(model, whole(1, 4))
    assert found.model.get_submodule("0").weight.shape == (4, 4)
    assert found.model.get_submodule("2").weight.shape == (4, 4)
    assert_same(found.model, model, whole(64, 4))


def test_constants_move_into_the_bias() -> None:
    model = integers_(nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 3, 3, bias=False), nn.Flatten()))
    zero_(model[0].weight, 1)
    with torch.no_grad():
        model[0].bias[1] = 5
    found = compact(model, whole(1, 2, 6, 6))
    second = found.model.get_submodule("2")
    assert second.weight.shape == (3, 3, 3, 3)
    torch.testing.assert_close(second.bias.data, 5 * model[2].weight.data[:, 1].sum((1, 2)), rtol=0, atol=0)
    assert_same(found.model, model, whole(9, 2, 6, 6))
    assert found.report.folded == 1
    assert "  1 constant folded into biases and weights" in str(found)


def test_one_constant_stays_for_all_beside_zero_padding() -> None:
    model = nn.Sequential(nn.Conv2d(2, 6, 3), nn.ReLU(), nn.Conv2d(6, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 2, 1))
    model = model.double().eval()
    zero_(model[0].weight, [1, 3, 4])
    with torch.no_grad():
        model[0].bias[[1, 3, 4]] = torch.tensor([2.0, 0.5, -1.0], dtype=torch.float64)
    found = compact(model, whole(1, 2, 6, 6))
    assert found.model.get_submodule("2").weight.shape == (3, 4, 3, 3), "two constants become one, the negative goes"
    assert_same(found.model, model, whole(9, 2, 6, 6), 1e-14)
    assert [(each.layer, each.count) for each in found.report.stayed] == [("0", 1)]
    assert "0: 1 dead feature kept: it represents the constants at the zero padding of 2" in str(found)


@pytest.mark.parametrize("module", [nn.AvgPool2d(2, padding=1), nn.ZeroPad2d(1)])
def test_constants_stay_where_zeros_are_mixed_in(module: nn.Module) -> None:
    model = nn.Sequential(nn.Conv2d(2, 4, 1), module, nn.Conv2d(4, 3, 1)).eval()
    zero_(model[0].weight, slice(0, 2))
    zero_(model[0].bias, 0)
    found = compact(model, torch.randn(1, 2, 6, 6))
    assert found.model.get_submodule("2").weight.shape == (3, 3, 1, 1)
    assert_same(found.model, model, torch.randn(5, 2, 6, 6), 1e-6)


def test_constants_stay_beside_functional_padding() -> None:
    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Conv2d(2, 4, 1), nn.Conv2d(4, 3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.two(F.pad(self.one(x), (1, 0, 1, 0)))

    model = Padded().eval()
    zero_(model.one.weight, slice(0, 2))
    zero_(model.one.bias, 0)
    found = compact(model, torch.randn(1, 2, 6, 6))
    assert found.model.get_submodule("two").weight.shape == (3, 3, 2, 2)
    assert_same(found.model, model, torch.randn(5, 2, 6, 6), 1e-6)


def test_scales_of_zero() -> None:
    """A normalisation or a parameter that multiplies with zero kills a feature that has live weights."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.three = nn.Linear(3, 5), nn.Linear(5, 4), nn.Linear(4, 2)
            self.norm, self.scale = nn.BatchNorm1d(5), nn.Parameter(torch.rand(4))

        def forward(self, x: Tensor) -> Tensor:
            return self.three(self.two(self.norm(self.one(x))) * self.scale)

    model = Scaled().eval()
    zero_(model.norm.weight, 2)
    zero_(model.scale, 1)
    nn.init.normal_(model.norm.bias)
    found = compact(model, torch.randn(2, 3))
    assert shapes(found.model) == {
        **{"one.weight": (4, 3), "one.bias": (4,), "norm.weight": (4,), "norm.bias": (4,), "scale": (3,)},
        **{"two.weight": (3, 4), "two.bias": (3,), "three.weight": (2, 3), "three.bias": (2,)},
    }
    assert_same(found.model, model, torch.randn(6, 3), 1e-6)


def test_unread_features_go_whatever_their_value() -> None:
    model = nn.Sequential(nn.Conv2d(2, 5, 3, padding=1), nn.BatchNorm2d(5), nn.ReLU(), nn.Conv2d(5, 4, 3, padding=1))
    model = nn.Sequential(*model, nn.Flatten(), nn.Linear(64, 3)).eval()
    zero_(model[3].weight, slice(None), [0, 2])
    zero_(model[5].weight, slice(None), slice(16, 32))
    zero_(model[5].weight, slice(None), slice(32, 40))
    found = compact(model, torch.randn(1, 2, 4, 4))
    assert found.model.get_submodule("1").running_var.shape == (3,)
    assert found.model.get_submodule("5").weight.shape == (3, 48), "half of a channel's pixels is not enough"
    assert_same(found.model, model, torch.randn(5, 2, 4, 4), 1e-6)


def kill_blocks_(net: models.resnet.ResNet) -> None:
    for block in net.stage2[1:]:
        zero_(block.conv1.weight, slice(0, 5))
        zero_(block.bn1.bias, slice(0, 5))
        zero_(block.bn1.running_mean, slice(0, 5))


def test_resnet20_inner_channels() -> None:
    net = models.resnet.resnet20().eval()
    kill_blocks_(net)
    found = compact(net, torch.randn(1, 3, 32, 32))
    assert shapes(found.model)["stage2.1.conv1.weight"] == (27, 32, 3, 3)
    assert shapes(found.model)["stage2.2.conv2.weight"] == (32, 27, 3, 3)
    assert found.report.parameters_before - found.report.parameters_after == 2 * 5 * (9 * 64 + 2)
    assert_same(found.model, net, torch.randn(4, 3, 32, 32), 1e-6)
    assert set(found.model.state_dict()) == set(net.state_dict())


def test_resnet20_channels_of_a_whole_stage() -> None:
    """New channels of a stage go if no block of it writes them; one block that does keeps them."""
    for writer, left in ((None, 60), (1, 64)):
        net = models.resnet.resnet20().eval()
        for at, block in enumerate(net.stage3):
            if at != writer:
                zero_(block.conv2.weight, slice(60, 64))
        found = compact(net, torch.randn(1, 3, 32, 32))
        assert shapes(found.model)["classifier.weight"] == (10, left)
        assert shapes(found.model)["stage3.0.conv2.weight"][0] == left
        assert_same(found.model, net, torch.randn(4, 3, 32, 32), 1e-6)
        stayed = {each.layer: str(each) for each in found.report.stayed}
        assert (left == 64) == ("stage3.0.conv2" in stayed)
        if left == 64:
            assert "4 dead features kept: tied to a live feature that" in stayed["stage3.0.conv2"]


@pytest.mark.parametrize("constant", [False, True])
def test_a_constant_branch_goes(constant: bool) -> None:
    net = models.resnet.resnet20().eval()
    zero_(net.stage1[1].conv2.weight)
    if constant:
        nn.init.normal_(net.stage1[1].bn2.bias)
    found = compact(net, torch.randn(1, 3, 32, 32))
    assert not any(name.startswith("stage1.1.") for name in found.model.state_dict())
    assert len(found.report.branches) == 1
    assert "its branch was removed" in str(found)
    assert "removed" in next(line for line in str(found).splitlines() if "stage1.1.conv1" in line)
    assert_same(found.model, net, torch.randn(4, 3, 32, 32), 1e-6)


def test_densenet() -> None:
    net = models.densenet.DenseNet(2).eval()
    zero_(net.features[1].conv.weight, slice(0, 5))
    found = compact(net, torch.randn(1, 3, 32, 32))
    assert shapes(found.model)["features.1.conv.weight"] == (7, 24, 3, 3)
    assert shapes(found.model)["features.2.bn.weight"] == (31,)
    assert shapes(found.model)["features.3.conv.weight"] == (48, 43, 1, 1)
    assert_same(found.model, net, torch.randn(4, 3, 32, 32), 1e-6)


def test_depthwise_filters_go_with_their_input() -> None:
    model = integers_(nn.Sequential(nn.Conv2d(2, 6, 1), nn.Conv2d(6, 12, 3, groups=6), nn.ReLU(), nn.Conv2d(12, 2, 1)))
    zero_(model[1].weight, [2, 3])
    zero_(model[1].weight, 6)
    zero_(model[1].bias, slice(2, 7))
    found = compact(model, whole(1, 2, 5, 5))
    depthwise = found.model.get_submodule("1")
    assert (depthwise.groups, depthwise.in_channels, depthwise.weight.shape[0]) == (5, 5, 10), "half a pair stays"
    assert found.model.get_submodule("0").weight.shape == (5, 2, 1, 1)
    assert_same(found.model, model, whole(9, 2, 5, 5))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], give_state: bool = False) -> None:
        super().__init__()
        self.cells = kind(4, 6, batch_first=True)
        self.head = nn.Linear(6, 3)
        self.give_state = give_state

    def forward(self, x: Tensor) -> Any:
        outputs, state = self.cells(x)
        logits = self.head(outputs[:, -1])
        return (logits, state) if self.give_state else logits


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_hidden_units(kind: type[nn.RNNBase]) -> None:
    """One that only reads itself, one that only that one reads, one that is always zero."""
    model = Recurrent(kind).double().eval()
    gates = model.cells.weight_hh_l0.shape[0] // 6
    zero_(model.head.weight, slice(None), [1, 4])
    with torch.no_grad():
        recurrent = model.cells.weight_hh_l0.view(gates, 6, 6)
        recurrent[:, [0, 2, 3, 4, 5], 1] = 0
        recurrent[:, [0, 2, 3, 4, 5], 4] = 0
        candidate = min(2, gates - 1)
        for each in (
            model.cells.weight_ih_l0,
            model.cells.weight_hh_l0,
            model.cells.bias_ih_l0,
            model.cells.bias_hh_l0,
        ):
            each.view(gates, 6, -1)[candidate, 5] = 0
    found = compact(model, torch.randn(2, 7, 4).double())
    assert shapes(found.model)["cells.weight_hh_l0"] == (3 * gates, 3)
    assert shapes(found.model)["head.weight"] == (3, 3)
    assert_same(found.model, model, torch.randn(5, 9, 4).double(), 1e-14)


def test_a_unit_that_a_live_one_feeds_is_not_zero() -> None:
    """Unit 4 gets nothing, unit 5 only something from unit 4, unit 3 something from unit 0."""
    model = Recurrent(nn.RNN).double().eval()
    for each in (model.cells.weight_ih_l0, model.cells.weight_hh_l0, model.cells.bias_ih_l0, model.cells.bias_hh_l0):
        zero_(each, slice(3, 6))
    with torch.no_grad():
        model.cells.weight_hh_l0[3, 0] = model.cells.weight_hh_l0[5, 4] = 1
    found = compact(model, torch.randn(2, 7, 4).double())
    assert shapes(found.model)["cells.weight_hh_l0"] == (4, 4)
    assert_same(found.model, model, torch.randn(5, 9, 4).double(), 1e-14)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_constants_move_into_the_bias_of_recurrent_layers(kind: type[nn.RNNBase], bias: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 4), Recurrent(kind)).double()
    model[1].cells = kind(4, 6, batch_first=True, bias=bias).double()
    zero_(model[0].weight, 1)
    found = compact(model, torch.randn(2, 7, 3).double())
    assert shapes(found.model)["0.weight"] == ((3, 3) if bias else (4, 3))
    assert found.report.folded == int(bias)
    assert_same(found.model, model, torch.randn(5, 9, 3).double(), 1e-14)


class LastState(nn.Module):
    """A classifier of the last state: h of a GRU; h and c of an LSTM."""

    def __init__(self, kind: type[nn.RNNBase], layers: int = 1) -> None:
        super().__init__()
        self.cells, self.head, self.other = kind(4, 6, layers), nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        _, state = self.cells(x)
        if isinstance(self.cells, nn.LSTM):
            return self.head(state[0][-1]) + self.other(state[1][-1])
        return self.head(state[-1]) + self.other(state[-1])


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_the_last_state_has_the_units_of_the_outputs(kind: type[nn.RNNBase], layers: int) -> None:
    model = LastState(kind, layers).double().eval()
    for name, weight in model.named_parameters():
        if name.startswith("cells.weight_hh") or name == "cells.weight_ih_l1":
            zero_(weight, slice(None), [1, 2])
    zero_(model.head.weight, slice(None), [1, 2])
    zero_(model.other.weight, slice(None), 2)
    found = compact(model, torch.randn(7, 2, 4).double())
    assert shapes(found.model)["head.weight"] == ((3, 5) if layers == 1 else (3, 6))
    assert_same(found.model, model, torch.randn(9, 5, 4).double(), 1e-14)


class Axes(nn.Module):
    """Axes of size one before and behind the features, and other orders of axes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.mix, self.head = nn.Conv1d(3, 6, 1), nn.Linear(6, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x.squeeze(1)).unsqueeze(0).unsqueeze(-1)
        x = torch.unsqueeze(x.squeeze(0).squeeze(dim=-1), 2).squeeze(2)
        return self.head(self.mix(x.transpose(1, 2)).permute(1, 0, 2)[0])


def test_axes_come_and_go() -> None:
    model = integers_(Axes())
    zero_(model.mix.weight, slice(None), [1, 4])
    zero_(model.head.weight, slice(None), 3)
    found = compact(model, whole(2, 1, 3, 7))
    assert shapes(found.model)["conv.weight"] == (4, 3, 1)
    assert shapes(found.model)["mix.weight"] == (4, 4)
    assert_same(found.model, model, whole(3, 1, 3, 7))


def test_layers_that_have_the_names_of_functions() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.split, self.add = nn.GRU(4, 6, batch_first=True), nn.Bilinear(6, 6, 3)
            self.view, self.masked_fill = nn.Linear(3, 5), nn.Linear(5, 2)

        def forward(self, x: Tensor) -> Tensor:
            outputs, _ = self.split(x)
            return self.masked_fill(torch.relu(self.view(self.add(outputs, outputs))))

    model = Named().double().eval()
    zero_(model.masked_fill.weight, slice(None), 1)
    found = compact(model, torch.randn(2, 7, 4).double())
    assert shapes(found.model)["view.weight"] == (4, 3)
    assert_same(found.model, model, torch.randn(5, 9, 4).double(), 1e-14)


class TwoPieces(nn.Module):
    """The same channels of two layers, one behind the other along the positions."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Conv1d(3, 6, 1), nn.Conv1d(3, 6, 2), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.cat((self.one(x), self.two(x)), 2).transpose(1, 2))


def test_positions_one_behind_the_other() -> None:
    model = integers_(TwoPieces())
    zero_(model.head.weight, slice(None), 1)
    for layer, dead in ((model.one, [2, 3]), (model.two, [3, 4])):
        zero_(layer.weight, dead)
        zero_(layer.bias, dead)
    found = compact(model, whole(2, 3, 7))
    assert shapes(found.model)["one.weight"] == (4, 3, 1), "one of which nobody reads, one that is zero in both"
    assert shapes(found.model)["two.weight"] == (4, 3, 2)
    assert_same(found.model, model, whole(5, 3, 9))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_a_state_that_is_given_out_keeps_its_units(kind: type[nn.RNNBase]) -> None:
    model = Recurrent(kind, give_state=True).eval()
    zero_(model.head.weight, slice(None), 1)
    zero_(model.cells.weight_hh_l0, slice(None), 1)
    assert shapes(compact(model, torch.randn(2, 7, 4)).model) == shapes(model)


def test_embedding_columns() -> None:
    model = nn.Sequential(nn.Embedding(9, 5), nn.Linear(5, 3))
    zero_(model[1].weight, slice(None), [0, 3])
    found = compact(model, torch.tensor([[1, 2]]))
    assert shapes(found.model)["0.weight"] == (9, 3)
    assert_same(found.model, model, torch.arange(9), 1e-6)


@pytest.mark.parametrize("padding", [None, 0, 4])
def test_rows_of_zeros_of_an_embedding_become_one(padding: int | None) -> None:
    model = integers_(nn.Sequential(nn.Embedding(30, 6, padding_idx=padding), nn.Linear(6, 3)))
    dead = [4, 5, 8, *range(12, 29)]
    zero_(model[0].weight, dead)
    found = compact(model, torch.tensor([[1, 2]]))
    embedding = found.model.get_submodule("0")
    assert embedding.weight.shape == (30 - len(dead) + 1, 6)
    assert embedding.num_embeddings == 11
    assert embedding.padding_idx == {None: None, 0: 0, 4: 4}[padding]
    assert found.report.rows == len(dead) - 1
    assert "19 zero rows of embeddings were merged" in str(found)
    assert_same(found.model, model, torch.arange(30).view(5, 6))
    again = compact(found.model, torch.tensor([[1, 2]]))
    assert again.report.rows == 0
    assert shapes(again.model) == shapes(found.model)


def test_rows_that_are_zero_where_columns_are_left() -> None:
    """Columns that nobody reads go first; then a row may have nothing left."""
    model = nn.Sequential(nn.Embedding(9, 5), nn.Linear(5, 3)).double()
    zero_(model[1].weight, slice(None), [0, 3])
    zero_(model[0].weight, slice(2, 8), [1, 2, 4])
    found = compact(model, torch.tensor([[1, 2]]))
    assert shapes(found.model)["0.weight"] == (4, 3)
    assert_same(found.model, model, torch.arange(9), 1e-14)


def test_few_rows_of_zeros_stay() -> None:
    """The table of whole numbers would be larger than what it saves."""
    model = nn.Sequential(nn.Embedding(9, 2), nn.Linear(2, 3))
    zero_(model[0].weight, [0, 3, 5])
    assert compact(model, torch.tensor([[1, 2]])).model.get_submodule("0").weight.shape == (9, 2)


def test_a_layer_that_is_used_twice_stays() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.again, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(F.relu(self.again(F.relu(self.again(F.relu(self.first(x)))))))

    model = Twice()
    zero_(model.again.weight, slice(None), 1)
    zero_(model.again.weight, [1, 2])
    zero_(model.last.weight, slice(None), 1)
    found = compact(model, torch.randn(2, 4))
    assert shapes(found.model) == shapes(model)
    assert "nothing could be removed" in str(found)
    assert "again: 2 dead features kept: it is called more than once" in str(found)


def test_tied_weights_stay() -> None:
    model = nn.Sequential(nn.Embedding(9, 5), nn.Linear(5, 9, bias=False))
    model[1].weight = model[0].weight
    zero_(model[0].weight, slice(None), 2)
    zero_(model[0].weight, 4)
    found = compact(model, torch.tensor([[1, 2]]))
    assert found.model.get_submodule("0").weight.shape == (9, 5)
    assert [str(each) for each in found.report.stayed] == ["1: 1 dead feature kept: it shares a tensor with another"]


def test_an_activation_in_place_that_others_see() -> None:
    class PreActivated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.head = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            return self.head(self.second(F.relu(x, inplace=True)) + x)

    model = PreActivated().eval()
    zero_(model.first.weight, 2)
    zero_(model.second.weight, 2)
    with torch.no_grad():
        model.first.bias[2] = -3
    assert_same(compact(model, torch.randn(2, 4)).model, model, torch.randn(6, 4), 1e-6)


def test_an_addition_in_place_that_others_see() -> None:
    """The branch is constant; what it is added to in place of the branch's result is used again."""

    class Onto(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.branch, self.head = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            y = self.branch(x)
            y += x
            return self.head(y) + self.head.weight.sum() * x[:, :3]

    model = Onto().eval()
    zero_(model.branch.weight)
    found = compact(model, torch.randn(2, 4))
    assert len(found.report.branches) == 1
    assert_same(found.model, model, torch.randn(6, 4), 1e-6)


def test_a_dead_layer_keeps_one_unit() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    zero_(model[0].weight)
    found = compact(model, torch.randn(2, 4))
    assert found.model.get_submodule("0").weight.shape == (1, 4)
    assert_same(found.model, model, torch.randn(6, 4), 1e-6)
    assert "the last one of 0, which cannot be empty" in str(found)


def test_saved_and_loaded_it_is_an_ordinary_module() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    zero_(model[2].weight, slice(None), 1)
    small = compact(model, torch.randn(2, 4)).model
    file = io.BytesIO()
    torch.save(small, file)
    file.seek(0)
    assert_same(torch.load(file, weights_only=False), model, torch.randn(6, 4), 1e-6)
    small.train()
    small(torch.randn(2, 4)).sum().backward()
    assert all(each.grad is not None for each in small.parameters())


def test_half_precision() -> None:
    model = nn.Sequential(nn.Linear(64, 90), nn.ReLU(), nn.Linear(90, 70), nn.ReLU(), nn.Linear(70, 3)).bfloat16()
    zero_(model[0].weight, slice(0, 40))
    found = compact(model, torch.randn(8, 64).bfloat16())
    assert shapes(found.model)["0.weight"] == (50, 64)
    assert {each.dtype for each in found.model.parameters()} == {torch.bfloat16}
    assert_same(found.model, model, torch.randn(8, 64).bfloat16(), 0.05)


def test_inputs_by_name() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 5), nn.Linear(5, 3)

        def forward(self, x: Tensor, *, scale: float = 2.0) -> Tensor:
            return self.b(torch.relu(self.a(x)) * 2.0) * scale

    model = Named()
    zero_(model.b.weight, slice(None), 1)
    found = compact(model, {"x": torch.randn(2, 4)})
    assert shapes(found.model)["a.weight"] == (4, 4)
    x = torch.randn(3, 4)
    torch.testing.assert_close(found.model(x=x), model(x=x))
    with pytest.raises(TypeError, match="scale"):
        found.model(x=x, scale=3.0)


def test_an_input_that_is_left_out() -> None:
    class Optional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 5), nn.Linear(5, 3)

        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            return self.b(torch.relu(self.a(x if mask is None else x * mask)))

    model = Optional()
    zero_(model.b.weight, slice(None), 1)
    found = compact(model, torch.randn(2, 4))
    assert shapes(found.model)["a.weight"] == (4, 4)
    assert_same(found.model, model, torch.randn(3, 4), 1e-6)
    masked = compact(model, (torch.randn(2, 4), torch.ones(4)))
    mask = torch.tensor([1.0, 0, 0, 1])
    x = torch.randn(3, 4)
    torch.testing.assert_close(masked.model(x, mask), model(x, mask))


def test_what_cannot_be_traced_is_named_in_one_sentence(capfd: pytest.CaptureFixture[str]) -> None:
    class Branches(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum() > 0 else -x

    with pytest.raises(UntraceableError, match=r"Branches.*not changed"):
        compact(Branches(), torch.randn(2, 4))
    assert capfd.readouterr().err == ""  # nor does the exporter log a page for each of its attempts


def test_outputs_that_differ_at_every_call_are_noticed() -> None:
    calls = itertools.count()

    class Counting(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + next(calls)

    with pytest.raises(CompactionError, match="same outputs"):
        compact(Counting(), torch.zeros(2, 4))


def test_an_example_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected an example input that Linear takes, got .* RuntimeError: mat1"):
        compact(nn.Linear(3, 2), torch.zeros(1, 4))
