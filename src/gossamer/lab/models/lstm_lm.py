"""The word-level language model: an embedding, two LSTM layers, and a decoder tied to the embedding.

With 33,278 words (WikiText-2) and 1,500 units it has 85,917,000 prunable weights, with the shared embedding
counted once. Dropout acts on the embedded words, between the LSTM layers and on their output, with one probability.
As in the PyTorch word-language-model example, the embedding starts uniform in ±0.1, the decoder's bias at
zero and the LSTM at PyTorch's default; He's scale is for ReLU and does not apply here. The LSTM is
PyTorch's own (cuDNN on a GPU): torch.export supports it, and torch.compile does not change it.
"""

from __future__ import annotations

from torch import Tensor, nn

__all__ = ["LSTMLanguageModel", "State", "detach_state", "lstm_lm"]

State = tuple[Tensor, Tensor]


class LSTMLanguageModel(nn.Module):
    """Predict the next word. Time comes first: tokens (steps, batch), logits (steps, batch, vocabulary)."""

    def __init__(self, vocabulary: int = 33_278, hidden: int = 1_500, layers: int = 2, dropout: float = 0.65) -> None:
        super().__init__()
        if not 0 <= dropout < 1:
            raise ValueError(f"expected a dropout of at least 0 and below 1, got {dropout}")
        self.dropout = nn.Dropout(dropout)
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.lstm = nn.LSTM(hidden, hidden, layers, dropout=dropout if layers > 1 else 0.0)
        self.decoder = nn.Linear(hidden, vocabulary)
        self.decoder.weight = self.embedding.weight
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)

    def forward(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Logits and the state after the last step; no state means a fresh start from zeros."""
        outputs, state = self.lstm(self.dropout(self.embedding(tokens)), state)
        return self.decoder(self.dropout(outputs)), state


def detach_state(state: State) -> State:
    """The same state with its history cut off, so that back-propagation stops at the window's edge."""
    return state[0].detach(), state[1].detach()


def lstm_lm(
    num_classes: int = 33_278, hidden: int = 1_500, layers: int = 2, dropout: float = 0.65
) -> LSTMLanguageModel:
    """`num_classes` is the size of the vocabulary."""
    return LSTMLanguageModel(num_classes, hidden, layers, dropout)
