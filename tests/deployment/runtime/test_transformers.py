"""Whole transformers in one native call, against torch: attention in all its forms, and the blocks of known models."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from drawn import any_variant, assert_near
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import gossamer
from gossamer.deployment.runtime import NativeModel, Setting, UnsupportedError, capture, load_native
from gossamer.deployment.runtime.decoding import Decoder as Decoding
from gossamer.deployment.runtime.network import Attention, Network, Normalise, Pointwise
from gossamer.lab.models.minilm import SentenceClassifier
from gossamer.lab.models.transformer import Decoder, VisionTransformer

transformers = pytest.importorskip("transformers", reason="pip install transformers")
WIDTH, HEADS, TOKENS, WORDS = 24, 4, 7, 50
drawn = settings(deadline=None, max_examples=15)  # each is traced anew, which takes most of the time


class Written(nn.Module):
    """A network whose forward pass is a function of its inputs."""

    def __init__(self, forward: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = forward

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(*inputs)


def in_heads(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


@drawn
@given(
    tokens=st.tuples(st.integers(1, 70), st.integers(1, 40)),
    heads=st.sampled_from([(1, 1), (3, 3), (4, 2), (4, 1)]),
    depths=st.tuples(st.integers(1, 9), st.integers(1, 6)),
    mask=st.sampled_from(["none", "causal", "numbers", "booleans", "of heads"]),
    written_out=st.booleans(),
    batch=st.sampled_from([1, 2, 5, 17]),
    lanes=st.sampled_from([1, 2, 4, 8, 16]),
    variant=any_variant,
    seed=st.integers(0, 99),
)
def test_attention(
    tokens: tuple[int, int],
    heads: tuple[int, int],
    depths: tuple[int, int],
    mask: str,
    written_out: bool,
    batch: int,
    lanes: int,
    variant: str,
    seed: int,
) -> None:
    """Queries of one sequence, keys and values of another (parts of one projection), with fewer heads."""
    torch.manual_seed(seed)
    (queries, keys), (own, shared), (depth, width) = tokens, heads, depths
    x, y = torch.randn(batch, queries, own * depth), torch.randn(batch, keys, shared * (depth + width))
    masks: dict[str, Tensor | None] = {
        "none": None,
        "causal": None,
        "numbers": torch.randn(queries, keys),
        "booleans": torch.rand(queries, keys) > 0.4,  # some rows may hide all keys
        "of heads": torch.randn(1, own, queries, keys),
    }
    chosen = masks[mask]

    def forward(x: Tensor, y: Tensor) -> Tensor:
        q = in_heads(x, own)
        k, v = (in_heads(part, shared) for part in y.split((shared * depth, shared * width), -1))
        k, v = (
            each.unsqueeze(2).expand(-1, -1, own // shared, -1, -1).reshape(len(each), own, keys, -1) for each in (k, v)
        )
        if written_out and mask in ("none", "numbers", "of heads"):
            scores = q @ k.transpose(-1, -2) / depth**0.5
            mixed = (scores if chosen is None else scores + chosen).softmax(-1) @ v
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, chosen, is_causal=mask == "causal")
        return mixed.transpose(1, 2).flatten(2)

    graph = capture.capture(Written(forward), (torch.cat([x, x])[:2], torch.cat([y, y])[:2]))
    assert sum(isinstance(op, Attention) for op in graph.operations) == 1
    native = NativeModel(graph, load_native(variant), Setting(lanes))
    got = native(x, y)
    assert torch.equal(native(x, y), got)  # the second call finds the arena as the first one left it
    if chosen is not None and chosen.is_floating_point():
        chosen = chosen.double()
    assert_near(got, forward(x.double(), y.double()), 5 * torch.ones(1))


def words(batch: int) -> Tensor:
    return torch.randint(1, WORDS, (batch, TOKENS))


def with_padding(batch: int) -> tuple[Tensor, Tensor]:
    mask = torch.ones(batch, TOKENS, dtype=torch.int64)
    mask[0, -2:] = 0
    return words(batch), mask


def images(batch: int) -> Tensor:
    return torch.randn(batch, 3, 8, 12)


def of_package(name: str, config: str, **options: Any) -> nn.Module:
    sizes = {"num_hidden_layers": 1, "num_attention_heads": HEADS, "intermediate_size": 40, "hidden_size": WIDTH}
    if config == "GPT2Config":
        sizes = {"n_embd": WIDTH, "n_layer": 1, "n_head": HEADS, "n_positions": 16}
    tokens = {} if config == "ViTConfig" else {"vocab_size": WORDS, "bos_token_id": 1, "eos_token_id": 2}
    model: nn.Module = getattr(transformers, name)(getattr(transformers, config)(**sizes, **tokens, **options))
    return model


def patches() -> nn.Module:
    return of_package("ViTForImageClassification", "ViTConfig", image_size=(8, 12), patch_size=4)


def encoder_layer(**options: Any) -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, HEADS, 40, batch_first=True, **options)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any]]] = {
    "minilm": (lambda: SentenceClassifier(2, WIDTH, 1, HEADS), lambda n: with_padding(n)[0] * with_padding(n)[1]),
    "vit": (lambda: VisionTransformer(5, 8, 4, WIDTH, 2, HEADS), lambda n: torch.randn(n, 3, 8, 8)),
    "decoder": (lambda: Decoder(WORDS, WIDTH, 1, HEADS, 16), lambda n: words(n).t().contiguous()),
    "bert": (lambda: of_package("BertForSequenceClassification", "BertConfig"), words),
    "bert, padded": (lambda: of_package("BertForSequenceClassification", "BertConfig"), with_padding),
    "bert, written out, padded": (
        lambda: of_package("BertForSequenceClassification", "BertConfig", attn_implementation="eager"),
        with_padding,
    ),
    "gpt2": (lambda: of_package("GPT2LMHeadModel", "GPT2Config", use_cache=False), words),
    "llama": (
        lambda: of_package("LlamaForCausalLM", "LlamaConfig", num_key_value_heads=2, use_cache=False),
        words,
    ),
    "vit, class token": (patches, images),
    "nn.TransformerEncoderLayer": (encoder_layer, lambda n: torch.randn(n, TOKENS, WIDTH)),
    "norm first, gelu": (
        lambda: encoder_layer(norm_first=True, activation="gelu"),
        lambda n: torch.randn(n, TOKENS, WIDTH),
    ),
    "rms norm": (lambda: nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 5)), lambda n: torch.randn(n, 3, WIDTH)),
}
CAPTURED: dict[str, tuple[nn.Module, Network]] = {}


def captured(name: str) -> tuple[nn.Module, Network]:
    """A model with weights of which 80 % are zero, and its graph; traced once."""
    if name not in CAPTURED:
        torch.manual_seed(0)
        make, example = MODELS[name]
        model = make().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0, 0.3)
                if parameter.dim() == 2:
                    parameter.mul_(torch.rand_like(parameter) > 0.8)
        inputs = example(2)
        CAPTURED[name] = model, capture.capture(model, inputs if isinstance(inputs, tuple) else (inputs,))
    return CAPTURED[name]


def tensors(outputs: Any) -> list[Tensor]:
    if hasattr(outputs, "to_tuple"):
        outputs = outputs.to_tuple()
    return [each for each in torch.utils._pytree.tree_leaves(outputs) if isinstance(each, Tensor)]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("lanes", [1, 4, 16])
def test_outputs_are_those_of_torch(name: str, lanes: int) -> None:
    model, graph = captured(name)
    native = NativeModel(graph, load_native(), Setting(lanes))
    for batch in (1, 3, 17):
        torch.manual_seed(batch)
        inputs = MODELS[name][1](batch)
        inputs = inputs if isinstance(inputs, tuple) else (inputs,)
        with torch.no_grad():
            expected = tensors(model(*inputs))
        for got, want in zip(tensors(native(*inputs)), expected, strict=True):
            scale = float(want.abs().max())
            torch.testing.assert_close(got, want, rtol=0, atol=1e-5 * scale)


def test_known_activations_and_norms_are_one_operation() -> None:
    operations = captured("gpt2")[1].operations
    assert sum(isinstance(op, Pointwise) and op.function == "gelu_tanh" for op in operations) == 1
    norms = [op for op in captured("llama")[1].operations if isinstance(op, Normalise)]
    assert [norm.centred for norm in norms] == [False] * 3


def test_threads_share_a_transformer() -> None:
    model, graph = captured("bert, padded")
    native = NativeModel(graph, load_native(), Setting(4, 2))
    cases = [with_padding(batch) for batch in (1, 5, 9)]
    with torch.no_grad():
        expected = [model(*case).logits for case in cases]
    wrong: list[int] = []

    def calls() -> None:
        for number in range(30):
            got = native(*cases[number % 3])
            if not torch.allclose(tensors(got)[0], expected[number % 3], rtol=0, atol=1e-4):
                wrong.append(number)

    threads = [threading.Thread(target=calls) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_explain_lists_attention() -> None:
    fast = gossamer.deploy(captured("vit")[0], images(1)[:, :, :, :8].contiguous(), seconds=0, remember=False)
    kinds = [line.kind for line in fast.explain().lines]
    assert kinds.count("attention") == 2
    assert kinds.count("normalisation") == 5


def test_masks_of_queries_of_each_sample_are_left_to_torch() -> None:
    def forward(x: Tensor, mask: Tensor) -> Tensor:
        q = in_heads(x, 2)
        return F.scaled_dot_product_attention(q, q, q, mask.unsqueeze(1)).transpose(1, 2).flatten(2)

    with pytest.raises(UnsupportedError, match="a mask that depends on the tokens and the queries"):
        capture.capture(Written(forward), (torch.randn(2, 5, 6), torch.randn(2, 5, 5)))


@pytest.mark.parametrize("name", ["gpt2", "llama", "decoder"])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_cache_gives_the_outputs_of_the_whole_sequence(name: str, batch: int) -> None:
    model, graph = captured(name)
    decoder = Decoding(NativeModel(graph, load_native()), batch=batch, seconds=0)
    tokens = words(batch)
    with torch.no_grad():
        expected = tensors(model(tokens.t() if name == "decoder" else tokens))[0]
    expected = expected.transpose(0, 1) if name == "decoder" else expected
    for _ in range(2):
        prompt = decoder(tokens[:, :3])
        got = torch.stack([prompt, *(decoder(tokens[:, i : i + 1]) for i in range(3, TOKENS))], 1)
        torch.testing.assert_close(got, expected[:, 2:], rtol=0, atol=1e-5 * float(expected.abs().max()))
        with pytest.raises(ValueError, match=f"at most {TOKENS} tokens, got {TOKENS} and 1 more"):
            decoder(tokens[:, :1])
        decoder.reset()


def test_only_causal_models_of_tokens_decode() -> None:
    with pytest.raises(UnsupportedError, match="one input, of tokens, and one output"):
        Decoding(NativeModel(captured("vit")[1], load_native()))
    fast = gossamer.deploy(Decoder(WORDS, WIDTH, 1, HEADS, 16), words(1).t().contiguous(), seconds=0, remember=False)
    assert fast.decoder(seconds=0.01)(words(1)).shape == (1, WORDS)


@pytest.mark.parametrize("name", ["minilm", "decoder", "bert, padded", "llama", "nn.TransformerEncoderLayer"])
def test_shorter_sequences(name: str) -> None:
    model, _ = captured(name)
    example = MODELS[name][1](2)
    axis = 0 if name == "decoder" else 1
    fast = gossamer.deploy(model, example, seconds=0, remember=False).native
    assert fast is not None
    for steps in (TOKENS, 1, 4, TOKENS - 1):
        inputs = MODELS[name][1](3)
        inputs = [
            each.narrow(axis, 0, steps).contiguous() for each in (inputs if isinstance(inputs, tuple) else (inputs,))
        ]
        with torch.no_grad():
            expected = tensors(model(*inputs))
        for got, want in zip(tensors(fast(*inputs)), expected, strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=1e-5 * float(want.abs().max()))


class ByLength(nn.Module):
    """Its outputs depend on the number of steps."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x) / x.shape[1]
        return y


def test_shorter_sequences_that_would_be_wrong_are_refused() -> None:
    fast = gossamer.deploy(ByLength(), torch.randn(2, 5, 6), seconds=0, remember=False).native
    assert fast is not None
    with pytest.raises(ValueError, match="expected an input of shape"):
        fast(torch.randn(2, 4, 6))
