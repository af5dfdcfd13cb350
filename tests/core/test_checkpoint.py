"""The sparse file: bit-identical, small, atomic, and safe against anything a stranger writes into it."""

from __future__ import annotations

import importlib
import itertools
import json
import os
import re
import struct
import time
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from gossamer.io import gap_code
from gossamer.io.sparse_file import load, save

DOCS = Path(__file__).parents[2] / "docs" / "file-format.md"
CODECS = ["none", "zlib", "zstd"]
relaxed = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)


@pytest.fixture(autouse=True)
def _zstd_or_skip(request: pytest.FixtureRequest) -> None:
    if "zstd" in getattr(request.node, "callspec", request).__dict__.get("params", {}).values():
        pytest.importorskip("zstandard")


def sparse(*shape: int, sparsity: float = 0.95, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    kept = torch.rand(shape, generator=generator) >= sparsity
    weights = (torch.randn(shape, generator=generator) * 0.05).to(dtype)
    return torch.where(kept, weights, torch.zeros((), dtype=dtype))


def assert_same_bits(a: Tensor, b: Tensor) -> None:
    assert a.dtype == b.dtype
    assert a.shape == b.shape
    raw = [t.reshape(-1).clone().as_strided((t.numel(),), (1,)).view(torch.uint8) for t in (a, b)]
    assert torch.equal(*raw)


def network() -> nn.Module:
    net = nn.Sequential(nn.Conv2d(3, 24, 3), nn.BatchNorm2d(24), nn.Flatten(), nn.Linear(96, 40), nn.Linear(40, 10))
    with torch.no_grad():
        for seed, p in enumerate(net.parameters()):
            if p.dim() > 1:
                p.copy_(sparse(*p.shape, seed=seed))
    return net


# ------------------------------------------------------------------------------------------------ round trips


@pytest.mark.parametrize("codec", CODECS)
def test_model_round_trip_is_bit_identical(tmp_path: Path, codec: Any) -> None:
    net, twin = network(), network()
    with torch.no_grad():
        for p in twin.parameters():
            p.zero_()
    saved = save(net, tmp_path / "net.safetensors", compress=codec)
    state = load(tmp_path / "net.safetensors", twin)
    assert saved.codec == codec
    assert saved.file_bytes == (tmp_path / "net.safetensors").stat().st_size
    assert list(state) == list(net.state_dict())
    for name, tensor in net.state_dict().items():
        assert_same_bits(state[name], tensor)
        assert_same_bits(twin.state_dict()[name], tensor)


@pytest.mark.parametrize("codec", CODECS)
def test_special_values_keep_every_bit(tmp_path: Path, codec: Any) -> None:
    bits = torch.zeros(4000, dtype=torch.int32)
    # -0.0, infinities, quiet and signalling NaNs with payloads, a subnormal
    patterns = [0x80000000, 0x7F800000, 0xFF800000, 0x7FC12345, 0x7F812345, 0xFFFFFFFF, 1]
    for i, pattern in enumerate(patterns):
        bits[i * 500 + 3] = struct.unpack("<i", struct.pack("<I", pattern))[0]
    tensor = bits.view(torch.float32).reshape(40, 100)
    saved = save({"w": tensor}, tmp_path / "f", compress=codec, negative_zeros="keep")
    assert saved.sparse_tensors == 1
    assert_same_bits(load(tmp_path / "f")["w"], tensor)
    bits[3] = 0  # nothing but −0.0 loses a bit
    save({"w": tensor}, tmp_path / "f", compress=codec)
    assert_same_bits(load(tmp_path / "f")["w"], tensor)


DTYPES = [torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8]
DTYPES += [torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_dense_and_sparse(tmp_path: Path, dtype: torch.dtype) -> None:
    raw = torch.from_numpy(np.random.default_rng(0).integers(0, 256, 8 * 600, dtype=np.uint8))
    dense = (raw % 2).to(torch.bool)[:600] if dtype is torch.bool else raw.view(dtype)[:600].clone()
    bits = dense.view(torch.uint8).reshape(600, -1).clone()
    bits[torch.arange(600) % 20 != 0] = 0
    holes = bits.reshape(-1).view(dtype)
    for codec in ("none", "zlib"):
        save({"dense": dense, "sparse": holes}, tmp_path / "f", compress=codec, negative_zeros="keep")
        state = load(tmp_path / "f")
        assert_same_bits(state["dense"], dense)
        assert_same_bits(state["sparse"], holes)


SHAPES = [(), (0,), (1,), (0, 3), (3, 0, 2), (7, 1, 5), (1, 300)]


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("fill", [0.0, 1.0])
def test_odd_shapes_all_zero_and_all_kept(tmp_path: Path, codec: Any, fill: float) -> None:
    state = {str(shape): torch.full(shape, fill) for shape in SHAPES}
    save(state, tmp_path / "f", compress=codec)
    for name, tensor in load(tmp_path / "f").items():
        assert_same_bits(tensor, state[name])


def test_empty_state_dict(tmp_path: Path) -> None:
    save({}, tmp_path / "f")
    assert load(tmp_path / "f") == {}


@relaxed
@given(
    sizes=st.lists(st.tuples(st.integers(0, 70), st.integers(1, 90)), min_size=1, max_size=4),
    sparsity=st.sampled_from([0.0, 0.3, 0.9, 0.99, 0.9999, 1.0]),
    codec=st.sampled_from(["none", "zlib"]),
    seed=st.integers(0, 9),
)
def test_round_trip_over_shapes(tmp_path: Path, sizes: list[Any], sparsity: float, codec: Any, seed: int) -> None:
    state = {f"w{i}": sparse(*size, sparsity=sparsity, seed=seed + i) for i, size in enumerate(sizes)}
    save(state, tmp_path / "f", compress=codec)
    back = load(tmp_path / "f")
    for name, tensor in state.items():
        assert_same_bits(back[name], tensor)


def test_chunks_and_blocks_are_invisible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same file, bit for bit, whatever the size of the pieces it is made of; and read alike."""
    state = {"a": sparse(90, 70, sparsity=0.9), "b": sparse(300, 40, sparsity=0.99), "c": torch.randn(5, 5)}
    save(state, tmp_path / "whole")
    for module in ("writer", "reader"):
        monkeypatch.setattr(f"gossamer.io.{module}.CHUNK", 37)
    save(state, tmp_path / "pieces")
    assert (tmp_path / "whole").read_bytes() == (tmp_path / "pieces").read_bytes()
    for name, tensor in load(tmp_path / "whole").items():
        assert_same_bits(tensor, state[name])


def test_tied_tensors_are_stored_once_and_come_back_tied(tmp_path: Path) -> None:
    shared = sparse(200, 100)
    saved = save({"in": shared, "out": shared, "view": shared.t()}, tmp_path / "f")
    alone = save({"in": shared, "view": shared.t()}, tmp_path / "g")
    assert saved.tied_tensors == 1
    assert saved.file_bytes - alone.file_bytes < 100
    state = load(tmp_path / "f")
    assert state["in"].data_ptr() == state["out"].data_ptr()
    assert_same_bits(state["view"], shared.t().contiguous())


def test_negative_zeros_are_zeros_unless_they_are_kept(tmp_path: Path) -> None:
    """A weight multiplied by its mask has −0.0 where a negative weight was pruned: half of the zeros."""
    kept = sparse(300, 200)
    product = torch.where(kept == 0, torch.where(torch.arange(200) % 2 == 0, -0.0, 0.0), kept)
    count = int((torch.signbit(product) & (product == 0)).sum())
    saved = save({"w": product}, tmp_path / "f")
    assert saved.negative_zeros == count
    assert saved.file_bytes == save({"w": kept}, tmp_path / "g").file_bytes
    assert_same_bits(load(tmp_path / "f")["w"], kept)
    exact = save({"w": product}, tmp_path / "f", negative_zeros="keep")
    assert exact.negative_zeros == count
    assert exact.file_bytes > 2 * saved.file_bytes
    assert_same_bits(load(tmp_path / "f")["w"], product)


def test_conjugate_and_negative_views_are_not_what_they_are_views_of(tmp_path: Path) -> None:
    z = torch.randn(6, 5, dtype=torch.complex64)
    state = {"z": z, "conj": z.conj(), "imag": z.imag, "minus": z.conj().imag, "one": z[:1, :1].conj()}
    saved = save(state, tmp_path / "f")
    assert saved.tied_tensors == 0
    loaded = load(tmp_path / "f")
    for name, tensor in state.items():
        assert_same_bits(loaded[name], tensor.resolve_conj().resolve_neg())


@pytest.mark.parametrize("there", [True, False])
def test_a_file_is_written_through_a_link(tmp_path: Path, there: bool) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(Path("elsewhere") / "file")
    if there:
        (tmp_path / "elsewhere" / "file").write_bytes(b"old")
    save(STATE, tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert not (tmp_path / "elsewhere" / "file").is_symlink()
    assert load(tmp_path / "elsewhere" / "file").keys() == STATE.keys()
    (tmp_path / "nowhere").symlink_to(tmp_path / "missing" / "file")
    with pytest.raises(FileNotFoundError, match="expected a folder to write file to"):
        save(STATE, tmp_path / "nowhere")


def test_plain_safetensors_files_load_too(tmp_path: Path) -> None:
    state = {
        "a": torch.randn(3, 4),
        "b": torch.arange(5),
        "c": torch.randn(2).bfloat16(),
        "d": torch.tensor(1.0),
    }
    save_file(state, tmp_path / "plain.safetensors")
    for name, tensor in load(tmp_path / "plain.safetensors").items():
        assert_same_bits(tensor, state[name])


# ------------------------------------------------------------------------------------------------- fewer bits


@pytest.mark.parametrize(("values", "dtype"), [("float16", torch.float16), ("bfloat16", torch.bfloat16)])
def test_half_values_round_like_torch(tmp_path: Path, values: Any, dtype: torch.dtype) -> None:
    state = {"w": sparse(100, 80), "dense": torch.randn(20, 20), "bias": torch.randn(9)}
    save(state, tmp_path / "f", values=values)
    back = load(tmp_path / "f")
    for name in ("w", "dense"):
        assert_same_bits(back[name], state[name].to(dtype).float())
    assert_same_bits(back["bias"], state["bias"])


@pytest.mark.parametrize("codec", CODECS)
def test_int8_values_are_within_half_a_step_of_each_row(tmp_path: Path, codec: Any) -> None:
    state = {"w": sparse(64, 300) * torch.logspace(-3, 3, 64)[:, None], "dense": torch.randn(12, 3, 3)}
    state["w"][5] = 0
    save(state, tmp_path / "f", values="int8", compress=codec)
    back = load(tmp_path / "f")
    for name, tensor in state.items():
        rows = tensor.reshape(tensor.shape[0], -1)
        error = (back[name].reshape(rows.shape) - rows).abs()
        assert bool((error <= rows.abs().amax(1, keepdim=True) / 127 * 0.50001).all())
        assert bool((back[name][tensor == 0] == 0).all())


def test_values_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"w: expected values within 65504, got 70000; use values='bfloat16'"):
        save({"w": torch.full((2, 2), 7e4)}, tmp_path / "f", values="float16")
    with pytest.raises(ValueError, match="expected finite values for int8"):
        save({"w": torch.full((2, 2), float("nan"))}, tmp_path / "f", values="int8")
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------------------- size


def binary_entropy_bits(tensor: Tensor) -> float:
    p = float((tensor != 0).double().mean())
    return tensor.numel() * float(-p * np.log2(p) - (1 - p) * np.log2(1 - p))


def value_entropy_bits(tensor: Tensor) -> float:
    planes = tensor[tensor != 0].numpy().view(np.uint8).reshape(-1, 4).T
    shares = [np.bincount(plane) / plane.size for plane in planes]
    return sum(float(-(p[p > 0] * np.log2(p[p > 0])).sum()) for p in shares) * planes.shape[1]


@pytest.mark.parametrize("codec", ["auto", "zstd"])
@pytest.mark.parametrize(("sparsity", "ratio"), [(0.9, 9.8), (0.95, 19.0), (0.98, 46.0)])
def test_size_is_within_five_per_cent_of_the_entropy(tmp_path: Path, codec: Any, sparsity: float, ratio: float) -> None:
    tensor = sparse(900, 1500, sparsity=sparsity)
    saved = save({"w": tensor}, tmp_path / "f", compress=codec)
    bound = (binary_entropy_bits(tensor) + value_entropy_bits(tensor)) / 8
    assert bound * 0.99 < saved.file_bytes < bound * (1.02 if codec == "auto" else 1.05)
    assert saved.ratio > ratio


def test_many_small_tensors_cost_little_more_than_their_values(tmp_path: Path) -> None:
    """A ResNet-20's worth of layers and norms: names, shapes and counts are a small part of the file."""
    state: dict[str, Tensor] = {}
    for i, channels in enumerate([16] * 7 + [32] * 6 + [64] * 6):
        state[f"layers.{i}.conv.weight"] = sparse(channels, channels, 3, 3, seed=i)
        for part in ("weight", "bias", "running_mean", "running_var"):
            state[f"layers.{i}.norm.{part}"] = torch.rand(channels)
        state[f"layers.{i}.norm.num_batches_tracked"] = torch.tensor(1000)
    values = sum(int(torch.count_nonzero(t)) if t.dim() > 1 else t.numel() for t in state.values())
    saved = save(state, tmp_path / "f")
    assert saved.file_bytes < values * 4.25 + 2000
    assert saved.ratio > 16.5


def test_memory_stays_bounded(tmp_path: Path) -> None:
    """numpy's buffers are traced: saving and loading 16 million weights takes a few chunks, not copies of
    them."""
    state = {"w": sparse(4000, 4000, sparsity=0.97)}
    tracemalloc.start()
    save(state, tmp_path / "f")
    peak_save = tracemalloc.get_traced_memory()[1]
    tracemalloc.reset_peak()
    load(tmp_path / "f")
    peak_load = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_save < 24 << 20
    assert peak_load < 40 << 20


# ---------------------------------------------------------------------------------------- the documented file


def documented_reader() -> Any:
    source = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)[0]
    assert len([line for line in source.splitlines() if line.strip()]) <= 60
    namespace: dict[str, Any] = {}
    exec(compile(source, str(DOCS), "exec"), namespace)
    return namespace["read_sparse_file"]


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("values", ["float32", "float16", "bfloat16", "int8"])
def test_reader_in_the_docs_agrees(tmp_path: Path, codec: Any, values: Any) -> None:
    net = nn.Sequential(nn.Linear(700, 300), nn.BatchNorm1d(300), nn.Linear(300, 300))
    with torch.no_grad():
        net[0].weight.copy_(sparse(300, 700, sparsity=0.6))  # more than one block of values
        net[2].weight.copy_(sparse(300, 300, sparsity=0.999))  # gaps with escapes
    state = {**net.state_dict(), "half": sparse(40, 40).bfloat16(), "flag": torch.tensor([True, False])}
    state["tied"] = state["0.weight"]
    save(state, tmp_path / "f", compress=codec, values=values)
    ours, theirs = load(tmp_path / "f"), documented_reader()(tmp_path / "f")
    assert list(ours) == list(theirs)
    for name, tensor in ours.items():
        assert_same_bits(torch.from_numpy(np.array(theirs[name])).to(tensor.dtype), tensor)


@pytest.mark.parametrize("codec", ["none", "zlib"])
def test_the_safetensors_library_opens_the_container(tmp_path: Path, codec: Any) -> None:
    save(network(), tmp_path / "f", compress=codec)
    with safe_open(tmp_path / "f", "np") as file:
        names, metadata = set(file.keys()), file.metadata()
        stored = file.get_tensor("gossamer.gaps").tobytes()
    assert {"gossamer.table", "gossamer.gaps", "gossamer.values.F32", "gossamer.values.I64"} == names
    assert metadata["crc32 gossamer.gaps"] == f"{zlib.crc32(stored):08x}"


def test_gap_code_by_hand() -> None:
    positions = np.array([0, 1, 256, 512, 767, 1533])
    stream = gap_code.encode_gaps(positions, -1)
    # 255 after position 512 is an escape and a gap of 254 is not
    assert stream.tolist() == [0, 0, 254, 255, 0, 254, 255, 255, 255, 0]
    decoded, last = gap_code.decode_gaps(stream, -1)
    assert decoded.tolist() == positions.tolist()
    assert last == 1533


# --------------------------------------------------------------------------------------------------- mistakes


def test_wrong_model_is_told_everything_and_left_alone(tmp_path: Path) -> None:
    save(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), tmp_path / "f")
    other = nn.Sequential(nn.Linear(4, 3, bias=False), nn.Linear(5, 2), nn.BatchNorm1d(2))
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(ValueError, match=r"(?s)0.bias: not in the model.*1.weight: the model has shape \(2, 5\)"):
        load(tmp_path / "f", other)
    for name, value in other.state_dict().items():
        assert_same_bits(value, before[name])


def test_wrong_arguments_and_tensors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected values to be one of float32, float16, bfloat16, int8, got 'int4'"):
        save({}, tmp_path / "f", values="int4")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected compress to be one of auto, none, zlib, zstd, got 'lz4'"):
        save({}, tmp_path / "f", compress="lz4")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"(?s)a: not an ordinary dense tensor.*b: str is not a tensor"):
        save({"a": torch.eye(3).to_sparse(), "b": "x"}, tmp_path / "f")  # type: ignore[dict-item]


def test_without_zstandard_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install zstandard"):
        save({"w": torch.zeros(3)}, tmp_path / "f", compress="zstd")
    assert save({"w": torch.zeros(3)}, tmp_path / "f", compress="auto").codec == "zlib"


def test_a_place_that_cannot_be_written_to_is_told(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"expected a folder to write f to, got .*nowhere: create it first"):
        save(nn.Linear(2, 2), tmp_path / "nowhere" / "f")
    with pytest.raises(IsADirectoryError, match="which is a folder"):
        save(nn.Linear(2, 2), tmp_path)


def test_a_folder_cannot_be_loaded(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError, match=r"expected a file, got the folder .*: name one in it"):
        load(tmp_path)


def test_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save({"w": sparse(30, 30)}, tmp_path / "f")
    before = (tmp_path / "f").read_bytes()

    def no_space(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match="No space left"):
        save({"w": sparse(30, 30, seed=1)}, tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["f"]


# ---------------------------------------------------------------------------------------------- hostile files


STATE = {
    "a": sparse(40, 50),
    "b": torch.arange(7),
    "c": sparse(30, 30, sparsity=0.995),
    "d": torch.ones(2, 3),
}


def load_or_refuse(path: Path) -> dict[str, Tensor] | None:
    """Loads, or raises ValueError with advice; anything else, and a large allocation, fails the test."""
    state, message = None, "expected, got"
    tracemalloc.start()
    try:
        state = load(path, max_bytes=1 << 20)
    except ValueError as error:
        message = str(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert "expected" in message
    assert "got" in message
    assert peak < 8 << 20
    return state


@relaxed
@given(
    codec=st.sampled_from(["none", "zlib", "zstd"]),
    values=st.sampled_from(["float32", "int8"]),
    data=st.data(),
)
def test_flipped_bytes_never_pass_unnoticed(tmp_path: Path, codec: Any, values: Any, data: st.DataObject) -> None:
    if codec == "zstd":
        pytest.importorskip("zstandard")
    save(STATE, tmp_path / "f", compress=codec, values=values)
    good = load(tmp_path / "f")
    raw = bytearray((tmp_path / "f").read_bytes())
    for place in data.draw(st.lists(st.integers(0, len(raw) - 1), min_size=1, max_size=3)):
        raw[place] ^= data.draw(st.integers(1, 255))
    (tmp_path / "f").write_bytes(raw)
    state = load_or_refuse(tmp_path / "f")
    if state is not None:  # a flip that undid another or hit blank space
        for name, tensor in good.items():
            assert_same_bits(state[name], tensor)


@pytest.mark.parametrize("codec", CODECS)
def test_truncated_files_are_refused(tmp_path: Path, codec: Any) -> None:
    save(STATE, tmp_path / "f", compress=codec)
    raw = (tmp_path / "f").read_bytes()
    for length in itertools.chain(range(0, 40), range(40, len(raw), 61), [len(raw) - 1]):
        (tmp_path / "f").write_bytes(raw[:length])
        assert load_or_refuse(tmp_path / "f") is None
    (tmp_path / "f").write_bytes(raw + b"\0")
    assert load_or_refuse(tmp_path / "f") is None


def forge(
    path: Path,
    rows: Any,
    *,
    gaps: bytes = b"",
    values: dict[str, bytes] | None = None,
    codec: str = "none",
    compress: Any = None,
) -> None:
    """A container with right checksums around whatever is passed, written without the library."""
    contents = {f"gossamer.values.{k}": (k, v) for k, v in (values or {}).items()}
    contents |= {"gossamer.gaps": ("U8", gaps), "gossamer.table": ("U8", json.dumps(rows).encode())}
    header: dict[str, Any] = {"__metadata__": {"format": "gossamer", "version": "1", "codec": codec}}
    body = b""
    for name, (dtype, raw) in contents.items():
        if codec == "zlib":
            dtype, raw = "U8", zlib.compress(raw)
        elif codec == "zstd":
            pack = compress or importlib.import_module("zstandard").ZstdCompressor().compress
            dtype, raw = "U8", pack(raw)
        width = {"F32": 4, "F16": 2, "I64": 8}.get(dtype, 1)
        header[name] = {
            "dtype": dtype,
            "shape": [len(raw) // width],
            "data_offsets": [len(body), len(body) + len(raw)],
        }
        header["__metadata__"][f"crc32 {name}"] = f"{zlib.crc32(raw):08x}"
        body += raw
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


def row(**changes: Any) -> dict[str, Any]:
    plain = {
        "name": "w",
        "shape": [10, 10],
        "dtype": "F32",
        "kind": "gap",
        "stored": "F32",
        "count": 2,
        "gap_bytes": 2,
    }
    return {**plain, **changes}


TWO = {"F32": np.array([1, 2], "<f4").tobytes()}


def test_forged_file_is_read_when_it_is_right(tmp_path: Path) -> None:
    forge(tmp_path / "f", [row()], gaps=bytes([3, 95]), values=TWO)
    expected = torch.zeros(100)
    expected[3], expected[99] = 1, 2
    assert_same_bits(load(tmp_path / "f")["w"], expected.reshape(10, 10))


HOSTILE: dict[str, dict[str, Any]] = {
    "gaps run past the end": {"rows": [row()], "gaps": bytes([3, 96])},
    "gaps with escapes run past the end": {
        "rows": [row(shape=[100, 10], gap_bytes=5)],
        "gaps": bytes([255] * 3 + [235, 0]),
    },
    "fewer positions than values": {
        "rows": [row(shape=[1000], gap_bytes=3, count=2)],
        "gaps": bytes([255, 255, 3]),
    },
    "more positions than values": {
        "rows": [row(count=1, shape=[1000])],
        "gaps": bytes([1, 1]),
        "values": {"F32": b"1234"},
    },
    "huge shape": {"rows": [row(shape=[1 << 31, 1 << 31])]},
    "overflowing shape": {"rows": [row(shape=[1 << 62, 1 << 62])]},
    "65 dimensions": {"rows": [row(shape=[1] * 63 + [10, 10])]},
    "overflow hidden behind a zero": {"rows": [row(shape=[1 << 62, 1 << 62, 0], count=0, gap_bytes=0)]},
    "negative shape": {"rows": [row(shape=[-1, -100])]},
    "shape of floats": {"rows": [row(shape=[10.0, 10])]},
    "shape of booleans": {"rows": [row(shape=[True, 100])]},
    "huge count": {"rows": [row(count=1 << 60, gap_bytes=1 << 60, shape=[1 << 61])]},
    "huge dense": {"rows": [row(kind="dense", count=1 << 50, shape=[1 << 50])]},
    "count above the size": {"rows": [row(count=101, gap_bytes=101)]},
    "more gap bytes than the stream": {"rows": [row(shape=[1000, 1000], gap_bytes=4)]},
    "dense with another count": {"rows": [row(kind="dense")]},
    "unknown kind": {"rows": [row(kind="csr")]},
    "unknown dtype": {"rows": [row(dtype="F31", stored="F31")]},
    "dtype of another type": {"rows": [row(dtype=["F32"])]},
    "integers stored as halves": {"rows": [row(dtype="I64", stored="F16")], "values": {"F16": b"1234"}},
    "the same tensor twice": {"rows": [row(count=1, gap_bytes=1), row(count=1, gap_bytes=1)]},
    "tied to nothing": {"rows": [row(), row(name="v", kind="same", same="x")]},
    "tied to another shape": {"rows": [row(), row(name="v", kind="same", same="w", shape=[100])]},
    "tied to itself": {"rows": [row(), row(name="v", kind="same", same="v")]},
    "values without a tensor": {"rows": []},
    "table is not a list": {"rows": {"w": row()}},
    "row is not an object": {"rows": ["w"]},
    "row without a name": {"rows": [{"shape": [3]}]},
}


@pytest.mark.parametrize("case", HOSTILE.values(), ids=HOSTILE.keys())
@pytest.mark.parametrize("codec", ["none", "zlib"])
def test_hostile_tables_are_refused(tmp_path: Path, case: dict[str, Any], codec: str) -> None:
    forge(tmp_path / "f", **{"gaps": bytes([3, 95]), "values": TWO, "codec": codec, **case})
    assert load_or_refuse(tmp_path / "f") is None


def test_a_compression_bomb_is_refused_before_it_goes_off(tmp_path: Path) -> None:
    size = 400 << 20
    forge(tmp_path / "f", [row(shape=[size], count=size, kind="dense", gap_bytes=0)], gaps=b"", codec="zlib")
    assert load_or_refuse(tmp_path / "f") is None
    zeros = row(shape=[size, 64], count=0, gap_bytes=0)
    forge(tmp_path / "f", [zeros], values={"F32": b""})
    with pytest.raises(ValueError, match=r"if you trust the file, load it with max_bytes=\d+"):
        load(tmp_path / "f")


@pytest.mark.parametrize("length", [1, 1 << 62])
def test_a_shape_of_very_many_dimensions_is_refused_at_once(tmp_path: Path, length: int) -> None:
    """The product of 400,000 large numbers takes minutes; compressed, they are a kilobyte."""
    shape = [length] * 400_000
    forge(tmp_path / "table", [row(shape=shape)], gaps=bytes([3, 95]), values=TWO, codec="zlib")
    header = json.dumps({"w": {"dtype": "F32", "shape": shape, "data_offsets": [0, 8]}}).encode()
    (tmp_path / "header").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    for name in ("table", "header"):
        started = time.perf_counter()
        with pytest.raises(ValueError, match=r"expected .*got"):
            load(tmp_path / name)
        assert time.perf_counter() - started < 5
    with pytest.raises(ValueError, match="65 dimensions, of which a file takes at most 64"):
        save({"w": torch.zeros([1] * 65)}, tmp_path / "f")


@pytest.mark.parametrize("codec", ["zlib", "zstd"])
def test_a_table_that_unpacks_to_far_more_than_it_is_stored_as_is_refused(tmp_path: Path, codec: Any) -> None:
    """A hundred megabytes of empty objects pack to some kilobytes, and parsed they take 2.5 GiB."""
    rows = [{}] * 2_000_000
    forge(tmp_path / "f", rows, codec=codec)
    assert (tmp_path / "f").stat().st_size < 20_000
    tracemalloc.start()
    with pytest.raises(ValueError, match=r"expected a table of at most \d+ bytes, got more"):
        load(tmp_path / "f")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 << 20


def test_a_zstd_window_of_more_than_8_mib_is_refused(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    wide = zstandard.ZstdCompressionParameters.from_level(1, window_log=27)
    stored = zstandard.ZstdCompressor(compression_params=wide).compressobj().compress
    forge(tmp_path / "f", [], codec="zstd", compress=lambda raw: stored(raw + b" " * (1 << 20)))
    with pytest.raises(ValueError, match=r"expected a zstd stream, got bytes that do not decode"):
        load(tmp_path / "f")


def test_max_bytes_bounds_plain_files_too(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(1000)}, tmp_path / "f")
    assert load(tmp_path / "f", max_bytes=4000)["w"].shape == (1000,)
    with pytest.raises(ValueError, match=r"expected at most 3999 bytes .* got 4000; if you trust .* max_bytes=4000"):
        load(tmp_path / "f", max_bytes=3999)


def test_a_newer_version_is_named(tmp_path: Path) -> None:
    forge(tmp_path / "f", [row()], gaps=bytes([3, 95]), values=TWO)
    (tmp_path / "f").write_bytes((tmp_path / "f").read_bytes().replace(b'"version": "1"', b'"version": "2"'))
    with pytest.raises(ValueError, match=r"expected file format version 1, got '2'; update gossamer"):
        load(tmp_path / "f")


HEADERS = [
    b"",
    b"[]",
    b"{",
    b"\xff\xfe",
    b"[" * 90000,
    b'{"a":1}',
    b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0]}}',
]
HEADERS += [b'{"a":{"dtype":"F32","shape":[99999999999],"data_offsets":[0,399999999996]}}']
HEADERS += [b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}', b'{"__metadata__":{"x":1}}']
HEADERS += [b'{"a":{"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,8]}}']


@pytest.mark.parametrize("header", HEADERS, ids=range(len(HEADERS)))
def test_hostile_headers_are_refused(tmp_path: Path, header: bytes) -> None:
    (tmp_path / "f").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    assert load_or_refuse(tmp_path / "f") is None
    (tmp_path / "f").write_bytes(struct.pack("<Q", 1 << 63) + header + bytes(8))
    assert load_or_refuse(tmp_path / "f") is None
