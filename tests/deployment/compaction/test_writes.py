"""Models that write in place: into tensors that are read again, into parts and views of them, into themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gossamer import compact
from gossamer.deployment.compaction import UntraceableError


class Writes(nn.Module):
    """Two layers with dead filters, between which something is written."""

    def __init__(self, between: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.between = between
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, 4)
        self.register_buffer("calls", torch.zeros(8, 1, 1))
        with torch.no_grad():
            self.first.weight[[2, 6]] = 0
            self.first.bias[[2, 6]] = 0
            self.second.weight[:, [1, 2]] = 0
            self.second.weight[5] = 0
            self.second.bias[5] = 0
            self.head.weight[:, [3, 6]] = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.between(self, x)).mean((2, 3)))


def relu_as_a_statement(m: Writes, x: Tensor) -> Tensor:
    y = m.first(x)
    y.relu_()
    return y


def twice(m: Writes, x: Tensor) -> Tensor:
    y = m.first(x)
    y.clamp_(min=0)
    y.mul_(2)
    return y


def by_a_function(m: Writes, x: Tensor) -> Tensor:
    y = m.first(x)
    z = F.relu(y, inplace=True)
    return y + z


def through_data(m: Writes, x: Tensor) -> Tensor:
    y = m.first(x)
    y.data.add_(1)
    return y


def the_input(m: Writes, x: Tensor) -> Tensor:
    x += 1
    x.relu_()
    return m.first(x)


def a_slice(m: Writes, x: Tensor) -> Tensor:
    y = torch.relu(m.first(x))
    y[:, :4] += 1
    return y


def a_slice_twice(m: Writes, x: Tensor) -> Tensor:
    y = m.first(x)
    part = y[:, 2:5]
    part.mul_(2)
    part.add_(1)
    return y


def a_chunk(m: Writes, x: Tensor) -> Tensor:
    y = m.first(x)
    left, right = y.chunk(2, 1)
    left.add_(right)
    return y


def pixels(m: Writes, x: Tensor) -> Tensor:
    y = m.first(x)
    y[:, :, 1:, ::2] = 0
    return y


def one_channel(m: Writes, x: Tensor) -> Tensor:
    y = m.first(x)
    y[:, 1] = 0.5
    return y


def everything(m: Writes, x: Tensor) -> Tensor:
    y = torch.zeros(x.shape[0], 8, *x.shape[2:])
    y[:] = m.first(x)
    return y


def where_negative(m: Writes, x: Tensor) -> Tensor:
    y = m.first(x)
    y[y < 0] = 0
    return y


def a_view(m: Writes, x: Tensor) -> Tensor:
    y = m.first(x)
    y.view(y.shape[0], -1).add_(1)
    return y


def other_axes(m: Writes, x: Tensor) -> Tensor:
    y = m.first(x)
    y.transpose(2, 3).mul_(2)
    return y


def a_view_from_before(m: Writes, x: Tensor) -> Tensor:
    y = m.first(x)
    view = y.flatten(1)
    y.relu_()
    return y + view.mean(1)[:, None, None, None]


#: Whether all dead filters go: three of the first layer, three of the second.
FOLLOWED: dict[str, tuple[Callable[[Any, Tensor], Tensor], bool]] = {
    each.__name__: (each, all_go)
    for all_go, group in (
        (True, [relu_as_a_statement, twice, by_a_function, the_input, a_slice, a_slice_twice, a_chunk]),
        (False, [pixels, one_channel, everything, where_negative, a_view, other_axes]),
        (False, [a_view_from_before]),
    )
    for each in group
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_outputs_are_those_of_the_model(name: str) -> None:
    torch.manual_seed(0)
    between, all_go = FOLLOWED[name]
    model, x = Writes(between).double().eval(), torch.randn(2, 3, 6, 6, dtype=torch.float64)
    if between is everything:
        model, x = model.float(), x.float()
    given, state = x.clone(), {key: value.clone() for key, value in model.state_dict().items()}
    found = compact(model, x)
    assert torch.equal(x, given)
    for key, value in model.state_dict().items():
        assert torch.equal(value, state[key]), key
    for batch in (1, 2, 5):
        x = torch.randn(batch, 3, 6, 6, dtype=x.dtype)
        with torch.no_grad():
            expected, got = model(x.clone()), found.model(x.clone())
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6 if x.dtype is torch.float32 else 1e-13)
    sizes = [found.model.get_parameter(f"{layer}.weight").shape[0] for layer in ("first", "second")]
    if all_go:
        tied = between is a_chunk  # filters 1, 2 and 6 are dead, 5 is not, and 1 goes with it or stays
        assert sizes == [6 if tied else 5, 5]
    else:
        assert sizes[1] == 5, "what comes behind the write is not held back"


def counts(m: Writes, x: Tensor) -> Tensor:
    m.calls.add_(1)
    return m.first(x) * m.calls


def replaces(m: Writes, x: Tensor) -> Tensor:
    m.calls = m.calls + 1
    return m.first(x) * m.calls


def counts_part(m: Writes, x: Tensor) -> Tensor:
    m.calls[:2] += 1
    return m.first(x) * m.calls


@pytest.mark.parametrize("between", [counts, replaces, counts_part])
def test_a_model_that_changes_itself_is_told_so(between: Callable[[Any, Tensor], Tensor]) -> None:
    model = Writes(between).eval()
    place = r"at .*test_writes.py, line \d+, by '.*between.*', "
    told = rf"leaves the model as it is, but in Writes {place}its own tensor calls, which it reads, is changed"
    with pytest.raises(UntraceableError, match=rf"{told}.*if self.training"):
        compact(model, torch.randn(2, 3, 6, 6))
    assert torch.equal(model.calls, torch.zeros(8, 1, 1))


def test_a_counter_that_nobody_reads_is_no_obstacle() -> None:
    def between(m: Writes, x: Tensor) -> Tensor:
        m.calls.add_(1)
        return m.first(x)

    assert compact(Writes(between).eval(), torch.randn(2, 3, 6, 6)).model.get_parameter("first.weight").shape[0] == 5


def another_shape(m: Writes, x: Tensor) -> Tensor:
    y = m.first(x)
    m.calls = y[0]
    y[:, :4] += 1
    return y


@pytest.mark.parametrize("between", [through_data, another_shape])
def test_a_write_that_the_exporter_does_not_follow_is_refused(between: Callable[[Any, Tensor], Tensor]) -> None:
    with pytest.raises(UntraceableError, match=r"but for Writes it reports: .*not changed"):
        compact(Writes(between).eval(), torch.randn(2, 3, 6, 6))
