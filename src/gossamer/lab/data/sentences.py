"""SST-2: sentences of film reviews, positive or negative, as token ids of MiniLM-L6, and batches of them.

The files are tables with the columns sentence and label. GLUE does not publish the labels of its test set, so its
development set, 872 sentences, is the test set here; 6,735 sentences of its training set are the validation set. The
binomial error of a test accuracy is 0.9 points.
"""

import csv
import io
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from gossamer.lab.data.batches import BatchSource, Position, epoch_plan
from gossamer.lab.data.files import CorruptData, File, read_checked, read_tar_members
from gossamer.lab.data.locate import Layout, locate, read_first
from gossamer.lab.data.pretrained import TOKENIZER, minilm_folder
from gossamer.lab.data.sets import Sentences, SentenceSet

__all__ = ["SentenceBatches", "load_sst2", "locate_sst2", "tokenize"]

TOKENS = 64  # of a sentence; four of the training set are longer, by up to two, and are cut
PADDING = 0
_PARTS = (  # training, validation, test
    File("sst-2/train.tsv", "sha256:920e317b2c52e12cd22db1da2c6708312bd7dc4f3712b9bbf1b50ee6c2c792ba", 3_422_882),
    File("sst-2/dev.tsv", "sha256:92353770071a2a889f75d000a38a9e541ea8f0a5499e50f040b17917a5cbf66f", 383_214),
    File("sst-2/test.tsv", "sha256:54a9c12c77e402fc14d6a66a506f24d999f596b0176eb777c972cccc2f9cc4b0", 94_931),
)
_ARCHIVE = File("sst-2.tar.xz", "sha256:e028d8c5426662b460b0d1ad318494bce7dceb8bd502053ea0449d68b5d15e13", 527_572)


def load_sst2(root: Path | str | None = None) -> SentenceSet:
    """Read the set from the first place that has it (see `gossamer.lab.data.locate`)."""
    return read_first("sst2", _layouts(), (), root=root)


def locate_sst2() -> Path | None:
    """The first folder that has the set."""
    return locate(_layouts())


def _layouts() -> tuple[Layout[SentenceSet], ...]:
    return (
        Layout("tables", tuple(part.path for part in _PARTS), _read_tables),
        Layout("an archive of them", (_ARCHIVE.path,), _read_archive),
    )


def _read_tables(folder: Path) -> SentenceSet:
    return _from_contents([read_checked(folder, part) for part in _PARTS])


def _read_archive(folder: Path) -> SentenceSet:
    sizes = {part.path: part.size or 0 for part in _PARTS}
    members = read_tar_members(read_checked(folder, _ARCHIVE), sizes, str(folder / _ARCHIVE.path))
    return _from_contents([members[part.path] for part in _PARTS])


def _from_contents(contents: list[bytes]) -> SentenceSet:
    train, validation, test = map(_labelled, contents)
    return SentenceSet("sst2", train, validation, test, ("negative", "positive"))


def _labelled(content: bytes) -> Sentences:
    try:
        rows = list(csv.DictReader(io.StringIO(content.decode()), delimiter="\t", quoting=csv.QUOTE_NONE))
        texts, labels = [row["sentence"] for row in rows], [int(row["label"]) for row in rows]
    except (UnicodeDecodeError, KeyError, TypeError, ValueError) as error:
        raise CorruptData(f"sst2: expected the columns sentence and label, got {error!r}; fetch it again") from error
    return Sentences(tokenize(texts), torch.tensor(labels))


def tokenize(texts: list[str]) -> Tensor:
    """The token ids of MiniLM-L6, one row per text, padded or cut to the same length."""
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ImportError("sentences are cut into tokens by tokenizers: run pip install 'gossamer[text]'") from error
    tokenizer = Tokenizer.from_file(str(minilm_folder() / TOKENIZER))
    tokenizer.enable_truncation(TOKENS)
    tokenizer.enable_padding(pad_id=PADDING, length=TOKENS)
    return torch.tensor([each.ids for each in tokenizer.encode_batch(texts)])


class SentenceBatches(BatchSource):
    """Iterate over (tokens, labels) batches on the device, an epoch at a time; `state` works like that of `Batches`."""

    def __init__(
        self, part: Sentences, batch_size: int, *, training: bool, seed: int = 0, device: torch.device | str = "cpu"
    ) -> None:
        if batch_size < 1 or len(part) < (batch_size if training else 1):
            raise ValueError(f"expected at least {batch_size} sentences, a batch, got {len(part)}: lower batch_size")
        self._part, self._training = part.to(device), training
        self._size, self._device = batch_size, device
        self._plan = partial(epoch_plan, len(part), seed=seed, shuffle=training)
        self._position = Position()

    def __len__(self) -> int:
        count = len(self._part)
        return count // self._size if self._training else -(-count // self._size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        position = self._position
        order = self._plan(epoch=position.epoch).order.to(self._device)
        for step in range(position.step, len(self)):
            rows = order[step * self._size : (step + 1) * self._size]
            position = position.next(len(self))
            self._position = position
            yield self._part.tokens[rows], self._part.labels[rows]
