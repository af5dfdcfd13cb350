"""The file of a race in mid-run: what comes back is what was written, or an error that names the file."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save
from torch import Tensor

from gossamer.lab.batched.checkpoint import before, fill_, read, read_newest, remove, write

ABOUT = {"epochs": 3, "runs": ["a", "b"]}


def tensors() -> dict[str, Tensor]:
    numbers = torch.Generator().manual_seed(0)
    return {
        "weight": torch.randn(3, 5, generator=numbers),
        "mask": torch.rand(3, 5, generator=numbers) < 0.5,
        "step": torch.tensor(7),
        "nothing": torch.empty(0, 4, dtype=torch.bfloat16),
    }


def test_what_was_written_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "race.safetensors"
    assert read(path) is None
    write(path, tensors(), ABOUT)
    found = read(path)
    assert found is not None
    assert found[0].keys() == tensors().keys()
    assert all(torch.equal(found[0][name], tensor) for name, tensor in tensors().items())
    assert {name: found[1][name] for name in ABOUT} == ABOUT


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damage_never_passes_unnoticed(tmp_path: Path, data: st.DataObject) -> None:
    """A flipped bit, or an end that is missing. What is in the header but is not read (blanks) may change."""
    path = tmp_path / "race.safetensors"
    write(path, tensors(), ABOUT)
    content = bytearray(path.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        content[place] ^= 1 << data.draw(st.integers(0, 7))
    else:
        del content[place:]
    path.write_bytes(content)
    try:
        found = read(path)
    except ValueError:
        return
    assert found is not None
    told = {name: found[1].get(name) for name in ABOUT}
    same = found[0].keys() == tensors().keys() and all(torch.equal(found[0][n], t) for n, t in tensors().items())
    assert same, "a race would go on from this"
    assert told == ABOUT, "this would be another race"


@pytest.mark.filterwarnings("always:expected the checkpoint of a race")
def test_two_are_kept_and_a_damaged_one_never_pushes_out_a_whole_one(tmp_path: Path) -> None:
    path = tmp_path / "race.safetensors"

    def steps(place: Path) -> int:
        found = read(place)
        assert found is not None
        return int(found[1]["steps"])

    for number in (1, 2, 3):
        write(path, tensors(), {"steps": number})
    assert sorted(tmp_path.iterdir()) == sorted([path, before(path)])
    assert (steps(path), steps(before(path))) == (3, 2)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.warns(UserWarning, match="expected the checkpoint of a race in .*; going on from the one before"):
        found = read_newest(path)
    assert found is not None
    assert found[1]["steps"] == 2
    write(path, tensors(), {"steps": 4})
    assert (steps(path), steps(before(path))) == (4, 2)
    path.unlink()  # as after a kill between the two renamings
    found = read_newest(path)
    assert found is not None
    assert found[1]["steps"] == 2
    (tmp_path / f".{path.name}.0a1b2c3d4e5f.part").touch()
    remove(path)
    assert read_newest(path) is None
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 64,
        pickle.dumps({"weight": [1.0]}),
        save({"weight": torch.zeros(1)}),
        *(save({"weight": torch.zeros(1)}, metadata={"race": told}) for told in ("[]", "3", "{", "[" * 100_000)),
        save({"weight": torch.zeros(1)}, metadata={"race": json.dumps({"format": 2, "crc32": "none"})}),
    ],
    ids=["empty", "length", "pickle", "plain", "list", "number", "torn", "deep", "checksum"],
)
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "race.safetensors"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="expected the checkpoint of a race"):
        read(path)


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected the checkpoint of a race"):
        read(tmp_path)


@pytest.mark.parametrize("wrong", [{}, {"step": torch.zeros(2)}, {"step": torch.zeros(1)}])
def test_all_tensors_are_filled_or_none(wrong: dict[str, Any]) -> None:
    wanted = {"mask": torch.zeros(2), "step": torch.tensor(0.0)}
    with pytest.raises(ValueError, match="no tensor of the right shape for step"):
        fill_(wanted, {"mask": torch.ones(2), **wrong}, Path("race.safetensors"))
    assert not wanted["mask"].any()
    fill_(wanted, {"mask": torch.ones(2), "step": torch.tensor(4.0)}, Path("race.safetensors"))
    assert wanted["mask"].all()
    assert wanted["step"] == 4
