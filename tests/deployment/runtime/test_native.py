"""Building the kernels: compilers, the cache, zig, no compiler at all, and a run under the sanitizers."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import emulated
import pytest
import sanitizers
import torch
from torch import Tensor, nn

from gossamer.deployment.runtime import NoCompilerError, compiling, deploy, deployed, native
from gossamer.deployment.runtime.fallback import SparseLinears, by_csr, by_native, csr_linear, to_csr


@pytest.fixture(autouse=True)
def _fresh_library_cache() -> None:
    native._load_cached.cache_clear()
    native._private_directory.cache_clear()


def system_compiler() -> tuple[str, ...]:
    found = [c for c in native.find_compilers() if "ziglang" not in c]
    if not found:
        pytest.skip("no system compiler")
    return found[0]


def test_second_build_comes_from_the_cache(tmp_path: Path) -> None:
    first = native.build(system_compiler(), tmp_path, extra=("-O0",))
    stamp = first.stat().st_mtime_ns
    assert native.build(system_compiler(), tmp_path, extra=("-O0",)) == first
    assert first.stat().st_mtime_ns == stamp
    assert [path.name for path in tmp_path.iterdir()] == [first.name]
    assert native.build(system_compiler(), tmp_path, extra=("-O0", "-g0")) != first
    assert native.open_library(first).variant in compiling.VARIANTS


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_a_damaged_cache_entry_is_built_again(tmp_path: Path, share: float) -> None:
    library = native.build(system_compiler(), tmp_path, extra=("-O0",))
    content = library.read_bytes()
    library.write_bytes(content[: int(share * len(content))])
    again = native.build(system_compiler(), tmp_path, extra=("-O0",))
    assert [path.name for path in tmp_path.iterdir()] == [again.name]
    assert compiling.content_digest(again) in again.name
    middle = bytearray(again.read_bytes())
    middle[len(middle) // 2] ^= 0xFF
    again.unlink()
    again.write_bytes(middle)
    third = native.build(system_compiler(), tmp_path, extra=("-O0",))
    assert third.read_bytes() != bytes(middle)
    code = (
        "import sys; from gossamer.deployment.runtime import native; "
        "native.open_library(native.Path(sys.argv[1]), 'portable')"
    )
    done = subprocess.run([sys.executable, "-c", code, str(third)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-500:]


def test_an_installed_library_that_was_cut_short_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = native.build(system_compiler(), tmp_path, extra=("-O0",)).read_bytes()
    installed = tmp_path / compiling.installed_name()
    monkeypatch.setattr(native, "SOURCE", tmp_path / "kernels.c")
    for length in (0, 10, 50, len(whole) // 2, len(whole) - 1):
        installed.write_bytes(whole[:length])
        assert native.installed_library() is None
    installed.write_bytes(whole)
    assert native.installed_library() == installed


def test_a_variant_that_does_not_exist_is_refused() -> None:
    library = native.build(system_compiler(), native.cache_directory())
    with pytest.raises(ValueError, match=r"expected one of the kernel variants .*portable.*got 'mmx'"):
        native.open_library(library, "mmx")


@pytest.mark.skipif(importlib.util.find_spec("ziglang") is None, reason="the ziglang wheel is not installed")
def test_zig_builds_the_kernels_too(tmp_path: Path) -> None:
    library = native.build((sys.executable, "-m", "ziglang", "cc"), tmp_path)
    assert native.open_library(library).variant in compiling.VARIANTS


def test_an_unwritable_cache_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system_compiler()
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    monkeypatch.setenv("GOSSAMER_CACHE", str(blocked))
    monkeypatch.setattr(native, "installed_library", lambda: None)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert native.load_native().library.is_relative_to(tmp_path)


def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "find_compilers", lambda: [("/nonexistent/cc",)])
    monkeypatch.setattr(native, "installed_library", lambda: None)


def test_without_a_compiler_the_message_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    no_compiler(monkeypatch)
    with pytest.raises(NoCompilerError, match="pip install ziglang") as told:
        native.load_native()
    assert str(told.value).count("/nonexistent/cc --version") == 1  # for the cache, and again for a temporary folder


def sparse_mlp(sparsity: float) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(600, 700), nn.ReLU(), nn.Linear(700, 10))
    with torch.no_grad():
        model[0].weight.mul_(torch.rand_like(model[0].weight) >= sparsity)
    return model.eval()


def test_without_a_compiler_torch_runs_the_sparse_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    no_compiler(monkeypatch)
    model = sparse_mlp(0.99)
    x = torch.randn(64, 600)
    fast = deploy(model, x, seconds=0.1)
    assert fast.explain().engine in ("torch CSR", "torch")
    assert "pip install ziglang" in str(fast.explain())
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
        for batch in (1, 3, 100):  # any batch, whatever the example's
            torch.testing.assert_close(fast(x[:1].expand(batch, -1)), model(x[:1].expand(batch, -1)))


class Waves(nn.Module):
    """Has no native form as a whole; the last layer is run by its weight, as some code does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(300, 400), nn.Linear(400, 300), nn.Linear(300, 20)

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(torch.sin(self.first(x)))
        return nn.functional.linear(y, self.last.weight, self.last.bias)


@pytest.mark.parametrize("way", ["native", "csr"])
@torch.no_grad()
def test_linear_layers_are_replaced_where_the_whole_has_no_native_form(way: str) -> None:
    if way == "native":
        system_compiler()
    torch.manual_seed(0)
    model = Waves().eval()
    for layer in (model.first, model.last):
        layer.weight.mul_(torch.rand_like(layer.weight) < 0.05)
    sparse = SparseLinears(model, by_csr if way == "csr" else by_native(native.load_native()))
    assert sparse.sparse == ["first", "last"]
    for shape in ((1, 300), (5, 7, 300), (64, 300), (0, 300)):
        x = torch.randn(shape)
        torch.testing.assert_close(sparse(x), model(x), rtol=1e-4, atol=1e-5)
    assert type(model.first) is nn.Linear


def test_deploy_says_which_layers_run_sparse(monkeypatch: pytest.MonkeyPatch) -> None:
    system_compiler()
    model = Waves().eval()
    with torch.no_grad():
        model.first.weight.mul_(torch.rand_like(model.first.weight) < 0.05)
    times = {"torch": [2.0], "torch, sparse linear layers native": [1.0]}
    monkeypatch.setattr(deployed, "time_in_turns", lambda *_: times)
    said = str(deploy(model, torch.randn(2, 300), seconds=0, remember=False).explain())
    assert "2.00 times as fast as torch by 1 layer (first); no native form of the whole: no native kernel for" in said
    times["torch"] = [1.0]
    explanation = deploy(model, torch.randn(2, 300), seconds=0, remember=False).explain()
    assert explanation.engine == "torch"
    assert "alone are not faster here" in explanation.reason


def test_without_a_compiler_a_dense_model_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    no_compiler(monkeypatch)
    explanation = deploy(sparse_mlp(0), torch.randn(4, 600), seconds=0).explain()
    assert explanation.engine == "torch"
    assert "no linear layer is sparse enough" in explanation.reason


@pytest.mark.parametrize("batch", [1, 63, 64, 65, 200])
def test_csr_linear(batch: int) -> None:
    torch.manual_seed(0)
    weight = torch.randn(30, 40) * (torch.rand(30, 40) > 0.9)
    x, bias = torch.randn(batch, 2, 40), torch.randn(30)
    csr = to_csr(weight)
    assert csr.col_indices().dtype == torch.int32
    torch.testing.assert_close(csr_linear(csr, x, bias), nn.functional.linear(x, weight, bias))


@pytest.mark.parametrize("kind", list(sanitizers.FLAGS))
def test_sanitizers_find_nothing(kind: str, tmp_path: Path) -> None:
    """The short form; ``python tests/sanitizers.py`` runs all of it."""
    if sanitizers.runtime_libraries(kind) is None:
        pytest.skip(f"no gcc with the {kind} sanitizer")
    sanitizers.run(kind, tmp_path, short=True)


def test_kernels_for_aarch64_are_right(tmp_path: Path) -> None:
    """The short form; ``python tests/emulated.py`` runs all of it."""
    if problem := emulated.missing():
        pytest.skip(problem)
    emulated.run(tmp_path, short=True)
