"""The graph that compaction, the runtime and the exporters share."""

from __future__ import annotations

from operator import attrgetter

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gossamer.deployment.graph import UntraceableError, aten, module_path, trace, trace_any_size
from gossamer.flops import positions
from gossamer.lab import models
from gossamer.prunable import select


class Block(nn.Module):
    """Writes in place, dropout, normalisation and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.relu = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(inplace=True)
        self.drop, self.again, self.last = nn.Dropout(0.5), nn.Linear(4, 6, bias=False), nn.Linear(6, 3)
        self.again.weight = self.first.weight

    def forward(self, x: Tensor, part: bool = False) -> Tensor:
        y = self.norm(self.first(x))
        y += self.again(x)
        if part:
            y[:, 2:4] *= 2
        return self.last(F.dropout(self.drop(self.relu(y)), 0.5, self.training))


@pytest.mark.parametrize("part", [False, True])
def test_the_normal_form_computes_what_the_model_computes(part: bool) -> None:
    model, x = Block(), torch.randn(5, 4)
    model.norm.running_var.uniform_(0.5, 2)
    module = trace(model, (x, part)).module
    assert model.training, "the model is left in the mode that it had"
    with torch.no_grad():
        assert torch.equal(module(x, part), model.eval()(x, part))
    calls = [node.target for node in module.graph.nodes if node.op == "call_function"]
    assert not any(call._schema.is_mutable for call in calls)
    assert aten.dropout.default not in calls
    assert calls.count(aten.batch_norm.default) == 1
    assert (aten.cat.default in calls) == part, "a write into a part is a concatenation"
    assert aten.slice_scatter.default not in calls


@pytest.mark.parametrize("name", ["digits_cnn", "lenet300", "resnet20", "densenet40", "indrnn", "lstm_lm"])
def test_multiply_adds_of_the_graph_are_those_of_the_model(name: str) -> None:
    """The counter reads ATen operations, of a model that runs or of its graph alike."""
    entry = models.entry(name)
    model = models.create(name, **({"hidden": 8} if name == "lstm_lm" else {}))
    inputs = torch.randint(8, (3, 2)) if entry.tokens else torch.randn(2, *entry.input_shape)
    weights = select(model)
    counted = positions(model, weights, inputs, batch_size=2)
    assert any(counted.values())
    assert positions(trace(model, inputs).module, weights, inputs, batch_size=2) == counted


@pytest.mark.parametrize("part", [False, True])
def test_tensors_and_calls_have_the_names_of_the_model(part: bool) -> None:
    model = Block()
    module = trace(model, (torch.randn(5, 4), part)).module
    tensors = [node.target for node in module.graph.nodes if node.op == "get_attr"]
    assert set(tensors) <= set(model.state_dict())
    for name in tensors:
        assert attrgetter(name)(module) is attrgetter(name)(model)
    paths = [module_path(node) for node in module.graph.nodes if node.target is aten.linear.default]
    assert paths == ["first", "again", "last"]


class Steps(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.cells, self.relu = kind(4, 6, 2, batch_first=True, bidirectional=True), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.cells(x)[0]
        y[:, :, :3] += 1  # so that the graph is written anew
        return self.relu(y)[:, -1]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_the_number_of_steps_is_left_open(kind: type[nn.RNNBase]) -> None:
    model = Steps(kind).eval()
    module = trace_any_size(model, torch.randn(1, 7, 4)).module
    for batch, steps in ((1, 7), (3, 2)):
        x = torch.randn(batch, steps, 4)
        with torch.no_grad():
            torch.testing.assert_close(module(x), model(x))


def test_a_tensor_that_the_model_changes_and_reads_is_named() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x * self.calls

    model = Counts().eval()
    graph = trace(model, torch.randn(2, 3))
    with pytest.raises(UntraceableError, match=r"in Counts at .*, its own tensor calls, which it reads, is changed"):
        _ = graph.module
    assert model.calls == 0
