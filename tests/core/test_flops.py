"""Multiply-adds per connection, against counts written out by hand and against torch's own counter."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from gossamer.flops import positions
from gossamer.prunable import select


def counts(model: nn.Module, example: object, **options: int) -> dict[str, int]:
    return positions(model, select(model), example, **options)


def test_linear_counts_the_vectors_of_one_sample() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    assert counts(model, torch.randn(8, 3)) == {"0.weight": 1, "2.weight": 1}
    assert counts(model, torch.randn(8, 5, 7, 3)) == {"0.weight": 35, "2.weight": 35}
    assert counts(model, torch.randn(7, 8, 3).transpose(0, 1)) == {"0.weight": 7, "2.weight": 7}
    assert counts(model, torch.randn(3)) == {"0.weight": 1, "2.weight": 1}
    assert counts(model, torch.randn(8, 3), batch_size=1) == {"0.weight": 8, "2.weight": 8}


@pytest.mark.parametrize(
    ("layer", "shape", "expected"),
    [
        (nn.Conv1d(4, 6, 3), (4, 10), 8),
        (nn.Conv2d(4, 6, 3, stride=2, padding=1), (4, 9, 8), 5 * 4),
        (nn.Conv2d(4, 6, 3, dilation=2, groups=2), (4, 9, 8), 5 * 4),
        (nn.Conv2d(4, 4, 3, padding="same", groups=4), (4, 9, 8), 9 * 8),
        (nn.Conv3d(4, 6, (1, 2, 3)), (4, 3, 3, 3), 3 * 2 * 1),
        (nn.ConvTranspose1d(4, 6, 3, stride=2), (4, 10), 10),
        (nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2), (4, 5, 6), 30),
        (nn.Bilinear(3, 3, 2), (3,), 1),
    ],
    ids=str,
)
def test_convolutions(layer: nn.Module, shape: tuple[int, ...], expected: int) -> None:
    batch = torch.randn(2, *shape)
    example = (batch, batch) if isinstance(layer, nn.Bilinear) else batch
    assert counts(layer, example) == {"weight": expected}
    if not isinstance(layer, nn.Bilinear):
        assert counts(layer, batch[0]) == {"weight": expected}  # one sample without a batch axis


def test_total_agrees_with_the_counter_of_torch() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Conv2d(3, 8, 3, padding=1)
            self.depthwise = nn.Conv2d(8, 8, 3, stride=2, groups=8)
            self.up = nn.ConvTranspose2d(8, 4, 2, stride=2, groups=2)
            self.head = nn.Linear(4, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.up(self.depthwise(self.stem(x))).flatten(2).transpose(1, 2))

    model, example = Net(), torch.randn(2, 3, 12, 12)
    with FlopCounterMode(display=False) as reference:
        model(example)
    ours = counts(model, example)
    total = sum(2 * 2 * ours[weight.name] * weight.parameter.numel() for weight in select(model))
    assert total == reference.get_total_flops()


@settings(max_examples=40, deadline=None)
@given(
    groups=st.integers(1, 3),
    kernel=st.integers(1, 3),
    stride=st.integers(1, 3),
    dilation=st.integers(1, 2),
    padding=st.integers(0, 2),
    height=st.integers(5, 9),
    samples=st.integers(1, 3),
    transposed=st.booleans(),
)
def test_any_convolution_agrees_with_the_counter_of_torch(
    groups: int,
    kernel: int,
    stride: int,
    dilation: int,
    padding: int,
    height: int,
    samples: int,
    transposed: bool,
) -> None:
    kind = nn.ConvTranspose2d if transposed else nn.Conv2d
    layer = kind(2 * groups, 3 * groups, kernel, stride, padding, groups=groups, dilation=dilation)
    example = torch.ones(samples, 2 * groups, height, 7)
    with FlopCounterMode(display=False) as reference:
        layer(example)
    ours = 2 * samples * counts(layer, example)["weight"] * layer.weight.numel()
    assert ours == reference.get_total_flops()


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
@pytest.mark.parametrize("batch_first", [False, True])
def test_recurrent_layers_count_steps(kind: type[nn.RNNBase], batch_first: bool) -> None:
    model = kind(3, 4, num_layers=2, bidirectional=True, batch_first=batch_first)
    example = torch.randn(2, 5, 3) if batch_first else torch.randn(5, 2, 3)
    assert set(counts(model, example).values()) == {5}
    assert len(counts(model, example)) == 8
    assert set(counts(model, torch.randn(5, 3)).values()) == {5}


# torch says so itself, on any projected LSTM on a CPU
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
def test_projected_lstm_and_packed_sequences() -> None:
    model = nn.LSTM(3, 4, proj_size=2)
    assert counts(model, torch.randn(5, 2, 3)) == {"weight_ih_l0": 5, "weight_hh_l0": 5, "weight_hr_l0": 5}
    packed = nn.utils.rnn.pack_sequence([torch.randn(4, 3), torch.randn(3, 3), torch.randn(2, 3)])
    assert counts(nn.GRU(3, 4), packed) == {"weight_ih_l0": 3, "weight_hh_l0": 3}  # nine steps, three samples


def test_cells_count_calls() -> None:
    class Unrolled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.GRUCell(3, 4)

        def forward(self, steps: Tensor) -> Tensor:
            state = steps.new_zeros(steps.shape[0], 4)
            for step in steps.unbind(1):
                state = self.cell(step, state)
            return state

    assert counts(Unrolled(), torch.randn(2, 6, 3)) == {"cell.weight_ih": 6, "cell.weight_hh": 6}


class LanguageModel(nn.Module):
    """Time-first, the decoder tied to the embedding, either as a layer or as a bare function."""

    def __init__(self, functional: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 4)
        self.rnn = nn.LSTM(4, 4)
        self.unused = nn.Linear(2, 2)
        if not functional:
            self.decoder = nn.Linear(4, 11)
            self.decoder.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        states, _ = self.rnn(self.embedding(tokens))
        return self.decoder(states) if "decoder" in self._modules else F.linear(states, self.embedding.weight)


@pytest.mark.parametrize("functional", [False, True])
def test_tied_decoder_counts_and_look_up_does_not(functional: bool) -> None:
    expected = {"embedding.weight": 7, "rnn.weight_ih_l0": 7, "rnn.weight_hh_l0": 7, "unused.weight": 0}
    assert counts(LanguageModel(functional), torch.randint(11, (7, 3))) == expected


def test_embedding_alone_counts_nothing() -> None:
    assert counts(nn.Embedding(11, 4), torch.randint(11, (7, 3))) == {"weight": 0}
    assert counts(nn.EmbeddingBag(11, 4), torch.randint(11, (7, 3))) == {"weight": 0}


@pytest.mark.parametrize("batch_first", [False, True])
def test_attention(batch_first: bool) -> None:
    def sequences(length: int) -> Tensor:
        return torch.randn(2, length, 8) if batch_first else torch.randn(length, 2, 8)

    model = nn.MultiheadAttention(8, 2, batch_first=batch_first)
    same = sequences(6)
    assert counts(model, (same, same, same)) == {"in_proj_weight": 6, "out_proj.weight": 6}
    query, memory = sequences(3), sequences(6)
    assert counts(model, (query, memory, memory)) == {"in_proj_weight": 5, "out_proj.weight": 3}
    separate = nn.MultiheadAttention(8, 2, kdim=5, vdim=8, batch_first=batch_first)
    keys = memory[..., :5]
    expected = {"q_proj_weight": 3, "k_proj_weight": 6, "v_proj_weight": 6, "out_proj.weight": 3}
    assert counts(separate, {"query": query, "key": keys, "value": memory}) == expected


def test_fused_attention_of_evaluation_is_seen_and_restored() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    assert set(counts(layer, torch.randn(2, 6, 8)).values()) == {6}
    assert torch.backends.mha.get_fastpath_enabled()


def test_weights_that_are_changed_before_use() -> None:
    class Rescaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            centred = self.weight - self.weight.mean(1, keepdim=True)
            return F.linear(x, centred * 0.5)

    assert counts(Rescaled(3, 4), torch.randn(2, 5, 3)) == {"weight": 5}


def test_cast_under_autocast() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4))
    with torch.autocast("cpu", torch.bfloat16):
        assert counts(model, torch.randn(2, 5, 3)) == {"0.weight": 5, "1.weight": 5}


def test_activations_that_met_a_weight_do_not_stand_for_it() -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.position = nn.Parameter(torch.zeros(1, 5, 4))
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x + self.position)

    model = Positions()
    weights = select(model, include=["position", "layer"])
    assert positions(model, weights, torch.randn(1, 5, 4)) == {"position": 0, "layer.weight": 5}


def test_experts_by_einsum_and_by_product() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kernel = nn.Parameter(torch.randn(3, 4, 5))
            self.gain = nn.Parameter(torch.randn(3, 5))

        def forward(self, x: Tensor) -> Tensor:
            return torch.einsum("bi,eio->beo", x, self.kernel) * self.gain

    model = Experts()
    weights = select(model, include=["kernel", "gain"])
    assert positions(model, weights, torch.randn(2, 4)) == {"kernel": 1, "gain": 1}


def test_compiled_models_are_counted_uncompiled() -> None:
    """A compiled graph may run as one opaque kernel, so none may run while operations are counted."""
    runs = []

    def recording(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., object]:
        def run(*args: Tensor) -> object:
            runs.append(len(args))
            return graph(*args)

        return run

    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4)).eval()
    compiled = torch.compile(model, backend=recording)
    example = torch.randn(2, 5, 3)
    with torch.no_grad():
        compiled(example)
    assert len(runs) == 1
    assert counts(compiled, example) == {"_orig_mod.0.weight": 5, "_orig_mod.1.weight": 5}
    assert len(runs) == 1
    with torch.no_grad():
        compiled(example)
    assert len(runs) == 2


class Restless(nn.Module):
    """Changes everything it can in a forward pass, even in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.frozen = nn.Dropout().eval()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("last", torch.zeros(1, 3))

    def forward(self, x: Tensor, fail: bool = False) -> Tensor:
        self.calls += 1
        self.last = torch.rand_like(x)
        if fail:
            raise RuntimeError("on purpose")
        return self.frozen(self.norm(self.layer(x)))


@pytest.mark.parametrize("fail", [False, True])
def test_nothing_is_left_behind(fail: bool) -> None:
    model = Restless().train()
    model.frozen.eval()
    buffers = {name: (id(each), each.clone()) for name, each in model.named_buffers()}
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    if fail:
        with pytest.raises(RuntimeError, match="on purpose"):
            _count_from(model, fail=True)
    else:
        assert _count_from(model, fail=False) == {"layer.weight": 1}
    torch.testing.assert_close(torch.rand(4), expected, rtol=0, atol=0)
    assert model.training
    assert model.norm.training
    assert not model.frozen.training
    for name, buffer in model.named_buffers():
        assert id(buffer) == buffers[name][0]
        torch.testing.assert_close(buffer, buffers[name][1], rtol=0, atol=0)
    for module in model.modules():
        assert not module._forward_pre_hooks
        assert not module._forward_hooks


def _count_from(model: nn.Module, *, fail: bool) -> dict[str, int]:
    return counts(model, {"x": torch.ones(2, 3), "fail": fail})
