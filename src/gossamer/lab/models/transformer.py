"""Transformers: an encoder for images (ViT) and a decoder for text, of the same blocks.

A block normalises first: x + attention(norm(x)), then x + mlp(norm(x)), with GELU in an MLP four times as wide. Weights
of linear layers and embeddings start normal with standard deviation 0.02, as in GPT-2 and ViT; positions are learned,
and are no prunable weights.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["Attention", "Decoder", "VisionTransformer", "initialise_", "transformer_lm", "vit"]

_SCALE = 0.02


class Attention(nn.Module):
    """Self-attention with several heads; `causal` hides the future."""

    def __init__(self, width: int, heads: int, *, causal: bool, dropout: float) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"expected a width that {heads} heads divide, got {width}")
        self.heads, self.causal, self.dropout = heads, causal, dropout
        self.inputs = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """x is (batch, tokens, width); `mask` broadcasts to (batch, heads, tokens, tokens), and hides where False."""
        batch, tokens, width = x.shape
        query, key, value = self.inputs(x).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=self.causal
        )
        result: Tensor = self.output(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return result


class Block(nn.Module):
    """Attention and an MLP, each behind a layer norm and added to its input."""

    def __init__(self, width: int, heads: int, *, causal: bool, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal=causal, dropout=dropout)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.add(x, self.dropout(self.attention(self.norm1(x))))
        return torch.add(x, self.dropout(self.mlp(self.norm2(x))))


class VisionTransformer(nn.Module):
    """An image is cut into patches; the mean of their features after the last block is classified."""

    def __init__(
        self, num_classes: int = 10, side: int = 32, patch: int = 4, width: int = 192, layers: int = 6, heads: int = 3,
        dropout: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__()
        if side % patch:
            raise ValueError(f"expected images whose sides are multiples of patch={patch}, got {side}")
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.positions = nn.Parameter(torch.empty(1, (side // patch) ** 2, width))
        self.blocks = nn.Sequential(*(Block(width, heads, causal=False, dropout=dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.classifier = nn.Linear(width, num_classes)
        initialise_(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        logits: Tensor = self.classifier(self.norm(self.blocks(x)).mean(dim=1))
        return logits


class Decoder(nn.Module):
    """Predict the next word from those before it in the same window. Time comes first, as in `LSTMLanguageModel`:
    tokens (steps, batch), logits (steps, batch, vocabulary). Nothing is carried from window to window: the state, which
    the interface has, is empty. The decoder is tied to the embedding."""

    def __init__(
        self, vocabulary: int = 33_278, width: int = 256, layers: int = 6, heads: int = 4, context: int = 256,
        dropout: float = 0.2,
    ) -> None:  # fmt: skip
        super().__init__()
        if not 0 <= dropout < 1:
            raise ValueError(f"expected a dropout of at least 0 and below 1, got {dropout}")
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.empty(1, context, width))
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(width, heads, causal=True, dropout=dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.decoder = nn.Linear(width, vocabulary)
        self.decoder.weight = self.embedding.weight
        initialise_(self)

    def forward(self, tokens: Tensor, state: tuple[Tensor, ...] | None = None) -> tuple[Tensor, tuple[Tensor, ...]]:
        steps, most = len(tokens), self.positions.shape[1]
        if steps > most:
            raise ValueError(f"expected windows of at most {most} words (model_options.context), got {steps}: set bptt")
        x = self.dropout(self.embedding(tokens.t()) + self.positions[:, :steps])
        return self.decoder(self.dropout(self.norm(self.blocks(x)))).transpose(0, 1), ()


def initialise_(module: nn.Module) -> None:
    """Draw all weights and positions from the normal distribution, and zero the biases."""
    for name, parameter in module.named_parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, 0.0, _SCALE)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)


def vit(
    num_classes: int = 10, patch: int = 4, width: int = 192, layers: int = 6, heads: int = 3, dropout: float = 0.0
) -> VisionTransformer:
    return VisionTransformer(num_classes, 32, patch, width, layers, heads, dropout)


def transformer_lm(
    num_classes: int = 33_278, width: int = 256, layers: int = 6, heads: int = 4, context: int = 256,
    dropout: float = 0.2,
) -> Decoder:  # fmt: skip
    """`num_classes` is the size of the vocabulary."""
    return Decoder(num_classes, width, layers, heads, context, dropout)
