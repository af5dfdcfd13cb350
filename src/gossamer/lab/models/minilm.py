"""MiniLM-L6 (Wang et al. 2020) with a classifier: an encoder of 6 layers of 384, in which norms follow the sums (BERT).

The classifier reads the mean of the features of all tokens. The embeddings of positions and of the (one) segment are
added up, and are no prunable weights. Pretrained weights are those of sentence-transformers/all-MiniLM-L6-v2; see
`gossamer.lab.data.pretrained` for where they are.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from gossamer.lab.data.pretrained import WEIGHTS, minilm_folder
from gossamer.lab.models.transformer import Attention, initialise_

__all__ = ["SentenceClassifier", "minilm"]

_VOCABULARY, _POSITIONS, _WIDTH, _LAYERS, _HEADS = 30_522, 512, 384, 6, 12
_EPSILON = 1e-12


class PostNormBlock(nn.Module):
    """Attention and an MLP, each added to its input and then normalised."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention = Attention(width, heads, causal=False, dropout=dropout)
        self.norm1 = nn.LayerNorm(width, _EPSILON)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.norm2 = nn.LayerNorm(width, _EPSILON)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.norm1(x + self.dropout(self.attention(x, mask)))
        result: Tensor = self.norm2(x + self.dropout(self.mlp(x)))
        return result


class SentenceClassifier(nn.Module):
    """Takes token ids (batch, tokens); 0 is padding."""

    def __init__(
        self, num_classes: int = 2, width: int = _WIDTH, layers: int = _LAYERS, heads: int = _HEADS,
        dropout: float = 0.1,
    ) -> None:  # fmt: skip
        super().__init__()
        self.embedding = nn.Embedding(_VOCABULARY, width)
        self.positions = nn.Parameter(torch.empty(1, _POSITIONS, width))
        self.norm = nn.LayerNorm(width, _EPSILON)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(PostNormBlock(width, heads, dropout) for _ in range(layers))
        self.classifier = nn.Linear(width, num_classes)
        initialise_(self)

    def forward(self, tokens: Tensor) -> Tensor:
        given = tokens != 0
        x = self.dropout(self.norm(self.embedding(tokens) + self.positions[:, : tokens.shape[1]]))
        for block in self.blocks:
            x = block(x, given[:, None, None, :])
        weights = given.unsqueeze(2).to(x.dtype)
        mean = (x * weights).sum(1) / weights.sum(1).clamp_min(1.0)
        logits: Tensor = self.classifier(self.dropout(mean))
        return logits


def _own_names(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a BERT under the names here."""
    stored = {name: tensor.float() for name, tensor in stored.items()}
    positions = stored["embeddings.position_embeddings.weight"] + stored["embeddings.token_type_embeddings.weight"][0]
    found = {"embedding.weight": stored["embeddings.word_embeddings.weight"], "positions": positions[None]}
    places = {"norm": "embeddings.LayerNorm"}
    for number in range(_LAYERS):
        theirs, ours = f"encoder.layer.{number}", f"blocks.{number}"
        places |= {
            f"{ours}.attention.output": f"{theirs}.attention.output.dense",
            f"{ours}.norm1": f"{theirs}.attention.output.LayerNorm",
            f"{ours}.mlp.0": f"{theirs}.intermediate.dense",
            f"{ours}.mlp.2": f"{theirs}.output.dense",
            f"{ours}.norm2": f"{theirs}.output.LayerNorm",
        }
        for kind in ("weight", "bias"):
            parts = [stored[f"{theirs}.attention.self.{name}.{kind}"] for name in ("query", "key", "value")]
            found[f"{ours}.attention.inputs.{kind}"] = torch.cat(parts)
    for ours, theirs in places.items():
        found |= {f"{ours}.{kind}": stored[f"{theirs}.{kind}"] for kind in ("weight", "bias")}
    return found


def minilm(num_classes: int = 2, pretrained: bool = False, layers: int = _LAYERS) -> SentenceClassifier:
    """`pretrained` reads the weights of the encoder; the classifier is fresh."""
    network = SentenceClassifier(num_classes, layers=layers)
    if pretrained:
        if layers != _LAYERS:
            raise ValueError(f"expected layers={_LAYERS} with pretrained weights, got {layers}")
        tensors = _own_names(load_file(minilm_folder() / WEIGHTS))
        missing, unknown = network.load_state_dict(tensors, strict=False)
        if unknown or set(missing) != {"classifier.weight", "classifier.bias"}:
            raise ValueError(f"expected the weights of MiniLM-L6, got others: {', '.join([*unknown, *missing][:4])}")
    return network
