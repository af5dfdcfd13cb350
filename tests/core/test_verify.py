"""Verification finds what was changed by hand, and nothing else."""

import copy
import re
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gossamer.verify import DifferenceError, verify


def sparse_model() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Dropout(), nn.Linear(5, 3))
    with torch.no_grad():
        for layer in (model[0], model[4]):
            layer.weight[torch.rand_like(layer.weight) < 0.6] = 0
        model[0].weight[1, 2] = 0
        model[0].weight[0, 0] = 1
    return model.train()


@pytest.fixture
def model() -> nn.Sequential:
    return sparse_model()


@pytest.fixture
def example() -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(1))


def test_same_module_state_dict_program_and_function(model: nn.Sequential, example: Tensor) -> None:
    evaluated = copy.deepcopy(model).eval()
    program = torch.export.export(evaluated, (example,))
    others = [copy.deepcopy(model), model.state_dict(), program, program.module(), nn.DataParallel(evaluated)]
    for other in others:
        result = verify(model, other, example)
        assert result, str(result)
        assert (result.tensors, result.outputs, result.max_absolute) == (2, 1, 0.0)
        result.raise_if_different()
    by_function = verify(model, lambda x: evaluated(x).detach().numpy(), example)
    assert by_function
    assert (by_function.tensors, by_function.outputs) == (0, 1)
    assert str(by_function).startswith("same; compared 1 outputs")


def test_lost_and_new_zeros_are_named(model: nn.Sequential) -> None:
    other = copy.deepcopy(model)
    zeros = int((model[0].weight == 0).sum())
    with torch.no_grad():
        other[0].weight[1, 2] = 0.5
        other[0].weight[0, 0] = 0
    for form in (other, other.state_dict()):
        result = verify(model, form)
        assert not result
        assert result.differences == (
            f"0.weight: 1 zeros lost of {zeros}, the first at (1, 2)",
            f"0.weight: 1 new zeros of {zeros}, the first at (0, 0)",
        )
        with pytest.raises(DifferenceError, match="zeros lost"):
            result.raise_if_different()


def test_values_may_differ_where_zeros_do_not(model: nn.Sequential, example: Tensor) -> None:
    other = copy.deepcopy(model)
    with torch.no_grad():
        other[4].weight.mul_(1 + 1e-3)
    assert verify(model, other)
    result = verify(model, other, example)
    assert not result
    with torch.no_grad():
        outputs = model.eval()(example)
        expected = (outputs - other.eval()(example)).abs().max()
    assert result.max_absolute == pytest.approx(float(expected), rel=1e-4)
    assert result.max_relative == pytest.approx(float(expected / outputs.abs().max()), rel=1e-4)
    assert verify(model, other, example, tolerance=2e-3)
    assert not verify(model, other, example, tolerance=1e-5)


def test_missing_and_misshapen_tensors(model: nn.Sequential, example: Tensor) -> None:
    state = model.state_dict()
    state["0.weight"] = state["0.weight"][:, :3]
    del state["4.weight"]
    result = verify(model, state, example)
    assert result.differences[:2] == ("0.weight has shape (5, 3), expected (5, 6)", "4.weight is missing")
    assert "does not fit" in result.differences[2]


def test_sparse_and_half_state_dicts(model: nn.Sequential) -> None:
    state = {
        name: tensor.half() if tensor.is_floating_point() else tensor for name, tensor in model.state_dict().items()
    }
    state["0.weight"] = state["0.weight"].to_sparse()
    assert verify(model, state)


def test_tied_weight_under_another_name() -> None:
    one = nn.ModuleDict({"a": nn.Linear(3, 3, bias=False), "b": nn.Linear(3, 3, bias=False)})
    one["b"].weight = one["a"].weight
    assert verify(one, {"b.weight": one["a"].weight.detach().clone()})


def test_nested_outputs(example: Tensor) -> None:
    class Nested(nn.Module):
        def __init__(self, extra: object = None) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 2)
            self.extra = extra

        def forward(self, x: Tensor) -> object:
            y = self.layer(x)
            return OrderedDict(logits=y, states=(y * 2, [y * 3, None]), loss=1.5, extra=self.extra)

    model, other = Nested(), Nested()
    other.load_state_dict(model.state_dict())
    result = verify(model, other, {"x": example})
    assert result
    assert result.outputs == 4
    other.layer.bias.data[1] += 1
    names = [difference.split(" ")[0] for difference in verify(model, other, (example,)).differences]
    assert names == ["output['logits']", "output['states'][0]", "output['states'][1][0]"]
    (missing,) = verify(model, lambda x: {**model(x), "extra": x}, example).differences
    assert missing == "output['extra'] was not expected"
    assert verify(Nested("text"), Nested("text").layer).ignored == ()
    ignored = verify(model, lambda x: {**model(x), "extra": "text"}, example)
    assert ignored.ignored == ("output['extra'] (str)",)
    assert "not compared: output['extra'] (str)" in str(ignored)


def test_not_a_number_equals_itself_only() -> None:
    def returns(*values: float) -> nn.Module:
        class Fixed(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                return torch.tensor(values)

        layer = Fixed(1, 1)
        nn.init.ones_(layer.weight)
        return layer

    nan, inf = float("nan"), float("inf")
    x = torch.ones(1)
    assert verify(returns(nan, inf, 1), returns(nan, inf, 1), x)
    assert not verify(returns(nan, inf, 1), returns(0, inf, 1), x, tolerance=1)
    assert not verify(returns(nan, inf, 1), returns(nan, -inf, 1), x, tolerance=1)
    assert not verify(returns(0, 0, 0), returns(0, 1e-30, 0), x, tolerance=1e-3)


def test_models_and_inputs_are_left_alone(model: nn.Sequential) -> None:
    class Overwrites(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.mul_(2))

    other = Overwrites(*copy.deepcopy(model))
    example = torch.ones(2, 6)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    verify(model, other, example)
    torch.testing.assert_close(torch.rand(3), expected, rtol=0, atol=0)
    torch.testing.assert_close(example, torch.ones(2, 6), rtol=0, atol=0)
    assert model.training
    assert other.training
    torch.testing.assert_close(model[1].running_mean, torch.zeros(5), rtol=0, atol=0)


def test_wrong_arguments(model: nn.Sequential) -> None:
    with pytest.raises(TypeError, match="pass example_input"):
        verify(model, lambda x: x)
    with pytest.raises(TypeError, match="expected a module, a state dict or a function to compare with, got int"):
        verify(model, 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least 0, got -1"):
        verify(model, model, tolerance=-1)


def test_a_copy_in_half_precision_can_be_compared() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    with torch.no_grad():
        model[0].weight[::2] = 0.0
    other = copy.deepcopy(model).bfloat16()
    assert verify(model, other, torch.randn(3, 4), tolerance=0.05)
    with torch.no_grad():
        other[0].weight[1] = 0.0
    assert not verify(model, other, torch.randn(3, 4), tolerance=0.05)


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (lambda x: x[:, :1], r"has shape \(4, 1\), expected \(4, 3\)"),
        (lambda x: "words", "output is missing"),
    ],
)
def test_outputs_that_cannot_be_compared_differ(output: Any, message: str) -> None:
    class Other(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return output(super().forward(x))

    torch.manual_seed(0)
    model, other = nn.Linear(3, 3), Other(3, 3)
    other.load_state_dict(model.state_dict())
    found = verify(model, other, torch.randn(4, 3))
    assert not found
    assert any(re.search(message, each) for each in found.differences)
