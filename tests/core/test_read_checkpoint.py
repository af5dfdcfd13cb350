"""Checkpoints of other programs: what is read, what is refused, and that nothing is executed."""

import io
import json
import os
import pickle
import zipfile
from pathlib import Path

import pytest
import safetensors.torch
import torch
from fuzz.limits import Bounds, judge
from torch import Tensor, nn
from torch.nn.utils import prune

import gossamer
from gossamer.io.checkpoints import is_checkpoint, read_checkpoint


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    kept = torch.rand(6, 5, generator=generator) > 0.7
    return {
        "one.weight": torch.randn(6, 5, generator=generator) * kept,
        "one.bias": torch.randn(6, generator=generator),
        "two.weight": torch.randn(3, 6, generator=generator),
    }


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_safetensors_and_the_sparse_file(tmp_path: Path) -> None:
    safetensors.torch.save_file(tensors(), tmp_path / "a.safetensors")
    gossamer.save(tensors(), tmp_path / "b.safetensors")
    (tmp_path / "c").write_bytes((tmp_path / "a.safetensors").read_bytes())  # without the ending
    for name in ("a.safetensors", "b.safetensors", "c"):
        same(read_checkpoint(tmp_path / name), tensors())


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: state,
        lambda state: {"epoch": 3, "state_dict": state, "optimizer": {"state": {0: {"m": torch.ones(2, 2)}}}},
        lambda state: {"config": {"width": 3}, "ema_weights": state},
        lambda state: {f"module.{name}": value for name, value in state.items()},
        lambda state: {f"_orig_mod.module.{name}": value for name, value in state.items()},
    ],
    ids=["state dict", "trainer", "unknown name", "DDP", "compiled DDP"],
)
def test_files_of_torch_save(tmp_path: Path, wrap, zipped: bool) -> None:  # type: ignore[no-untyped-def]
    torch.save(wrap(tensors()), tmp_path / "model.pt", _use_new_zipfile_serialization=zipped)
    same(read_checkpoint(tmp_path / "model.pt"), tensors())


def test_hugging_face_folders_whole_and_split(tmp_path: Path) -> None:
    whole, split = tmp_path / "whole", tmp_path / "split"
    for folder in (whole, split):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
    safetensors.torch.save_file(tensors(), whole / "model.safetensors")
    same(read_checkpoint(whole), tensors())
    parts = {name: f"model-0000{number}-of-00003.safetensors" for number, name in enumerate(tensors(), 1)}
    for name, file in parts.items():
        safetensors.torch.save_file({name: tensors()[name]}, split / file)
    index = split / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": parts}))
    assert is_checkpoint(whole)
    assert is_checkpoint(split)
    assert not is_checkpoint(tmp_path)
    same(read_checkpoint(split), tensors())
    index.write_text(json.dumps({"weight_map": {"one.weight": "../whole/model.safetensors"}}))
    with pytest.raises(ValueError, match="expected files next to"):
        read_checkpoint(split)
    index.write_text(json.dumps({"weight_map": ["model.safetensors"]}))
    with pytest.raises(ValueError, match="expected a weight_map"):
        read_checkpoint(split)


def test_pruned_by_torch(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    prune.l1_unstructured(model[0], "weight", 0.5)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    found = read_checkpoint(tmp_path / "model.pt")
    assert sorted(found) == ["0.bias", "0.weight", "1.bias", "1.weight"]
    assert torch.equal(found["0.weight"], model[0].weight)
    assert int(found["0.weight"].count_nonzero()) == 12


def test_sparse_tensors_become_plain(tmp_path: Path) -> None:
    weight = tensors()["one.weight"]
    torch.save({"a": weight.to_sparse(), "b": weight[None].to_sparse()}, tmp_path / "model.pt")
    same(read_checkpoint(tmp_path / "model.pt"), {"a": weight, "b": weight[None]})


def test_tensors_that_only_claim_to_be_large_are_refused(tmp_path: Path) -> None:
    expanded = torch.ones(1, 1).expand(1 << 20, 1 << 20)
    none = torch.zeros(2, 0, dtype=torch.int64)
    empty = torch.sparse_coo_tensor(none, torch.zeros(0), (1 << 20, 1 << 20), check_invariants=True)
    for tensor in (expanded, empty):
        torch.save({"weight": tensor}, tmp_path / "model.pt")
        with pytest.raises(ValueError, match="expected at most 67,108,864 bytes of tensors"):
            read_checkpoint(tmp_path / "model.pt")


def test_a_sparse_tensor_with_indices_outside_is_refused(tmp_path: Path) -> None:
    outside = torch.sparse_coo_tensor(torch.tensor([[0], [9]]), torch.ones(1), (2, 2), check_invariants=False)
    torch.save({"weight": outside}, tmp_path / "model.pt")
    with pytest.raises(ValueError, match="or is damaged"):
        read_checkpoint(tmp_path / "model.pt")


class Command:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.folder / "was_executed"),)


def test_a_pickle_with_a_program_is_refused_unread(tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(2, 2), "extra": Command(tmp_path)}, tmp_path / "model.pt")
    (tmp_path / "bare.pt").write_bytes(pickle.dumps(Command(tmp_path)))
    torch.save(nn.Linear(2, 2), tmp_path / "module.pt")
    for name in ("model.pt", "bare.pt", "module.pt"):
        with pytest.raises(ValueError, match=r"with only tensors.*save model.state_dict\(\) instead"):
            read_checkpoint(tmp_path / name)
    assert not (tmp_path / "was_executed").exists()


def test_what_is_no_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "text.pt").write_text("hello, world")
    torch.save({"epoch": 3}, tmp_path / "empty.pt")
    for name, message in (
        ("text.pt", "not a safetensors file"),
        ("empty.pt", "expected tensors in .*got none"),
        ("nothing.pt", "does not exist"),
        (".", "expected a folder with weights in it"),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            read_checkpoint(tmp_path / name)


ALLOCATES = (
    b"\x80\x02}X\x01\x00\x00\x00wcbuiltins\nbytearray\n\x8a\x05\x00\x00\x00\x00\x04\x85Rs."  # bytearray(2 ** 34)
)


def with_pickle(path: Path, pickled: bytes, compression: int = zipfile.ZIP_STORED) -> None:
    """A file of torch.save with another pickle."""
    stream = io.BytesIO()
    torch.save({"weight": torch.zeros(256, 256)}, stream)
    with zipfile.ZipFile(stream) as whole, zipfile.ZipFile(path, "w", compression) as archive:
        for entry in whole.infolist():
            plain = entry.filename.endswith("data.pkl") and pickled
            archive.writestr(entry.filename, plain or whole.read(entry))


def legacy_with_pickle(path: Path, pickled: bytes) -> None:
    stream = io.BytesIO()
    torch.save({"weight": torch.zeros(2, 2)}, stream, _use_new_zipfile_serialization=False)
    stream.seek(0)
    for _ in range(3):
        pickle.load(stream)
    path.write_bytes(stream.getvalue()[: stream.tell()] + pickled + pickle.dumps([], 2))


def exponential(path: Path) -> None:
    tree: dict[str, object] = {}
    for _ in range(60):
        tree = {"a": tree, "b": tree}
    torch.save(tree, path)


def within_itself(path: Path) -> None:
    tree: dict[str, object] = {"weight": torch.ones(2, 2)}
    tree["again"] = tree
    torch.save(tree, path)


SMALL_BUT_HUGE = {
    "compressed": lambda path: with_pickle(path, b"", zipfile.ZIP_DEFLATED),
    "allocates": lambda path: with_pickle(path, ALLOCATES),
    "allocates, legacy": lambda path: legacy_with_pickle(path, ALLOCATES),
    "exponential": exponential,
    "within itself": within_itself,
    "deep": lambda path: with_pickle(path, b"\x80\x02" + b"}X\x01\x00\x00\x00a" * 20_000 + b"N" + b"s" * 20_000 + b"."),
}


@pytest.mark.parametrize("kind", SMALL_BUT_HUGE)
def test_a_small_file_that_expands_is_refused_in_no_time(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "model.pt"
    SMALL_BUT_HUGE[kind](path)
    refused: list[str] = []

    def read() -> None:
        try:
            read_checkpoint(path)
        except ValueError as error:
            refused.append(str(error))

    assert not judge(read, path.stat().st_size, Bounds()).problem
    assert refused
    assert str(path) in refused[0]


def test_many_small_files_do_not_add_up_to_more_than_one_may_hold(tmp_path: Path) -> None:
    names = {f"w{number}": f"{number}.safetensors" for number in range(3)}
    for name, file in names.items():
        gossamer.save({name: torch.zeros(2000, 3000)}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    with pytest.raises(ValueError, match="expected at most 19108864 bytes of tensors"):
        read_checkpoint(tmp_path)
    assert len(read_checkpoint(tmp_path, max_bytes=72_000_000)) == 3


def test_a_folder_does_not_name_itself(tmp_path: Path) -> None:
    for name in ("", "..", "a/b", "a\0b"):
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": name}}))
        with pytest.raises(ValueError, match="expected files next to"):
            read_checkpoint(tmp_path)


def test_float8_weights_pruned_by_torch_keep_their_names(tmp_path: Path) -> None:
    weight = torch.ones(3, 3).to(torch.float8_e4m3fn)
    torch.save({"w_orig": weight, "w_mask": torch.ones(3, 3)}, tmp_path / "model.pt")
    assert read_checkpoint(tmp_path / "model.pt").keys() == {"w_orig", "w_mask"}
