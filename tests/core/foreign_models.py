"""Architectures that nobody here wrote, tiny, built from their configuration with random weights.

``FOREIGN`` is for every test that claims to work on any model. Nothing is downloaded. All but the first need
the optional package transformers; ``needs_transformers`` says which.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class Foreign:
    """One architecture: ``build()`` the model, call it as ``model(**inputs())``.

    ``include`` is what ``select`` needs to find all connections, where it is not None.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Any]]
    include: tuple[str, ...] | None = None
    needs_transformers: bool = True


def total(output: object) -> Tensor:
    """A scalar to differentiate: the mean square of all outputs that depend on the weights."""
    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
    return torch.stack([leaf.float().square().mean() for leaf in leaves]).sum()


def _hugging_face(architecture: str, config: str, **settings: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        model: nn.Module = getattr(transformers, architecture)(getattr(transformers, config)(**settings))
        return model

    return build


def _tokens(*names: str, length: int = 6) -> Callable[[], dict[str, Any]]:
    return lambda: {name: torch.randint(3, 60, (2, length)) for name in names}


def _pixels(size: int = 32) -> Callable[[], dict[str, Any]]:
    return lambda: {"pixel_values": torch.randn(2, 3, size, size)}


def _wave() -> dict[str, Any]:
    return {"input_values": torch.randn(2, 400)}


def _speech() -> dict[str, Any]:
    return {"input_features": torch.randn(2, 8, 40), "decoder_input_ids": torch.randint(3, 60, (2, 5))}


def _source_and_target() -> dict[str, Any]:
    return {"src": torch.randn(2, 7, 16), "tgt": torch.randn(2, 4, 16)}


_SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
_TEXT = {**_SMALL, "vocab_size": 64}
_IMAGE = {**_SMALL, "image_size": 32, "patch_size": 8}
_BART = {
    **{"vocab_size": 64, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1},
    **{
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 32,
        "decoder_ffn_dim": 32,
    },
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
}

FOREIGN = [
    Foreign(
        "torch-transformer",
        lambda: nn.Transformer(16, 2, 2, 2, 32, batch_first=True),
        _source_and_target,
        needs_transformers=False,
    ),
    Foreign(
        "gpt2",
        _hugging_face(
            *("GPT2LMHeadModel", "GPT2Config"),
            **{"vocab_size": 64, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2},
            **{"bos_token_id": 1, "eos_token_id": 2},
        ),
        _tokens("input_ids"),
    ),
    Foreign("bert", _hugging_face("BertForMaskedLM", "BertConfig", **_TEXT), _tokens("input_ids")),
    Foreign(
        "albert",
        _hugging_face("AlbertForMaskedLM", "AlbertConfig", **_TEXT, embedding_size=8),
        _tokens("input_ids"),
    ),
    Foreign(
        "t5",
        _hugging_face(
            *("T5ForConditionalGeneration", "T5Config"),
            **{"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2},
        ),
        _tokens("input_ids", "decoder_input_ids"),
    ),
    Foreign(
        "bart",
        _hugging_face("BartForConditionalGeneration", "BartConfig", **_BART),
        _tokens("input_ids", "decoder_input_ids"),
    ),
    Foreign(
        "llama",
        _hugging_face("LlamaForCausalLM", "LlamaConfig", **_TEXT, num_key_value_heads=1),
        _tokens("input_ids"),
    ),
    Foreign(
        "mixtral",
        _hugging_face(*("MixtralForCausalLM", "MixtralConfig"), **_TEXT, num_key_value_heads=1, num_local_experts=3),
        _tokens("input_ids"),
        include=("*.weight", "*.experts.*_proj"),  # experts are stacked in three-dimensional parameters
    ),
    Foreign(
        "mamba",
        _hugging_face(
            *("MambaForCausalLM", "MambaConfig"),
            **{"vocab_size": 64, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 2},
        ),
        _tokens("input_ids"),
    ),
    Foreign("vit", _hugging_face("ViTForImageClassification", "ViTConfig", **_IMAGE), _pixels()),
    Foreign(
        "swin",
        _hugging_face(
            *("SwinForImageClassification", "SwinConfig"),
            **{"image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2]},
            window_size=4,
        ),
        _pixels(),
    ),
    Foreign(
        "resnet",
        _hugging_face(
            *("ResNetForImageClassification", "ResNetConfig"),
            **{"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"},
        ),
        _pixels(),
    ),
    Foreign(
        "convnext",
        _hugging_face(
            *("ConvNextForImageClassification", "ConvNextConfig"),
            hidden_sizes=[8, 16],
            depths=[1, 1],
            num_stages=2,
        ),
        _pixels(),
    ),
    Foreign(
        "mobilenet-v2",
        _hugging_face(
            *("MobileNetV2ForImageClassification", "MobileNetV2Config"), image_size=32, depth_multiplier=0.25
        ),
        _pixels(),
    ),
    Foreign(
        "wav2vec2",
        _hugging_face(
            *("Wav2Vec2Model", "Wav2Vec2Config"),
            **_SMALL,
            **{
                "conv_dim": (8, 8),
                "conv_stride": (5, 4),
                "conv_kernel": (10, 8),
                "num_conv_pos_embeddings": 8,
            },
            **{"num_conv_pos_embedding_groups": 2, "num_feat_extract_layers": 2},
        ),
        _wave,
        include=("*.weight", "*.original1"),  # a convolution with weight norm: its direction, not its length
    ),
    Foreign(
        "whisper",
        _hugging_face(
            *("WhisperForConditionalGeneration", "WhisperConfig"),
            **_BART,
            **{"num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 16},
        ),
        _speech,
    ),
]
