"""Native code reads addresses: whatever a caller passes, the answer is right or the error says what to do."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from gossamer.deployment.runtime import (
    Deployed,
    NativeModel,
    NoCompilerError,
    Setting,
    compile_plan,
    deployed,
    load_native,
    torch_op,
)
from gossamer.deployment.runtime.capture import capture
from gossamer.deployment.runtime.deployed import Explanation
from gossamer.deployment.runtime.fallback import SparseLinears, by_native

FEATURES = 100
FORKS = int(os.environ.get("GOSSAMER_TEST_FORKS", "20"))


def sparse_mlp() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 50), nn.ReLU(), nn.Linear(50, 10))
    with torch.no_grad():
        model[0].weight.mul_(torch.rand_like(model[0].weight) < 0.2)
    return model.eval()


MODEL = sparse_mlp()


@pytest.fixture(scope="module")
def fast() -> Deployed:
    try:
        native = compile_plan(MODEL, torch.randn(4, FEATURES))
    except NoCompilerError:
        pytest.skip("no compiler")
    return Deployed(native, Explanation("native", "", 4, {}, ()), native)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@torch.no_grad()
def check(run: Callable[[Tensor], Tensor], x: Tensor, values: Tensor | None = None) -> None:
    """The call twice: shapes seen for the first time are prepared, then taken the short way."""
    values = x if values is None else values
    want = MODEL(values)
    for _ in range(2):
        y = run(x)
        assert y.dtype is torch.float32
        assert not y.requires_grad
        torch.testing.assert_close(y, want, rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------------------------------------ global settings


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("batch", [4, 5, 64])
def test_the_default_dtype_has_no_say(fast: Deployed, dtype: torch.dtype, batch: int) -> None:
    x = torch.randn(batch, FEATURES)
    with default_dtype(dtype):
        check(fast, x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_model_deployed_under_another_default_dtype(dtype: torch.dtype) -> None:
    x = torch.randn(6, FEATURES)
    with default_dtype(dtype):
        check(compile_plan(MODEL, x), x)
        sparse = SparseLinears(MODEL, by_native(load_native()))
        assert sparse.sparse == ["0"]
        check(sparse, x)


def test_the_default_device_has_no_say(fast: Deployed) -> None:
    for batch in (4, 7):
        x = torch.randn(batch, FEATURES)
        with torch.device("meta"):
            check(fast, x)
            check(compile_plan(MODEL, x), x)


def test_autocast_and_inference_mode(fast: Deployed) -> None:
    x = torch.randn(4, FEATURES)
    want = MODEL(x).detach()
    for context in (torch.autocast("cpu", torch.bfloat16), torch.inference_mode()):
        for batch in (4, 1):
            with context:
                y = fast(x[:batch])
            torch.testing.assert_close(y, want[:batch], rtol=1e-4, atol=1e-5)
    with torch.inference_mode():
        made = torch.randn(4, FEATURES)
    check(fast, made)


class Doubled(TorchFunctionMode):
    """Gives every new tensor another dtype, as some libraries do."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function in (torch.empty, torch.empty_like, torch.zeros):
            kwargs["dtype"] = torch.bfloat16
        return function(*args, **kwargs)


class Logged(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append(str(function))
        return function(*args, **(kwargs or {}))


def test_modes_that_change_what_torch_makes(fast: Deployed) -> None:
    x = torch.randn(4, FEATURES)
    want = MODEL(x).detach()
    with Doubled():
        got = [fast(x), fast(x)]
    with Logged() as log:
        got.append(fast(x))
    for y in got:
        torch.testing.assert_close(y, want, rtol=1e-4, atol=1e-5)
    assert log.calls == ["gossamer.run.default"]


# ---------------------------------------------------------------------------------------------- tensors as they come


class Plain(Tensor):
    """A subclass that adds nothing."""


def in_storage(x: Tensor, offset: int) -> Tensor:
    """The values somewhere inside a larger storage."""
    room = torch.zeros(x.numel() + offset + 3)
    inside = room[offset : offset + x.numel()].view(x.shape)
    return inside.copy_(x)


SAME: dict[str, Callable[[Tensor], Tensor]] = {
    "as it is": lambda x: x,
    "parameter": lambda x: nn.Parameter(x),
    "requires grad": lambda x: x.clone().requires_grad_(),
    "subclass": lambda x: x.as_subclass(Plain),
    "transposed": lambda x: x.t().contiguous().t(),
    "every second": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "inside a storage": lambda x: in_storage(x, 5),
    "negated view": lambda x: torch._neg_view(-x),
    "imaginary part of a conjugate": lambda x: torch.complex(x, -x).conj().imag,
    "real part": lambda x: torch.complex(x, x).real,
    "negated, transposed": lambda x: torch._neg_view(-x.t().contiguous()).t(),
}


@pytest.mark.parametrize("kind", SAME)
@pytest.mark.parametrize("batch", [1, 4, 9])
@torch.no_grad()
def test_every_kind_of_tensor_is_read_right(fast: Deployed, kind: str, batch: int) -> None:
    x = torch.randn(batch, FEATURES)
    made = SAME[kind](x)
    for _ in range(2):
        torch.testing.assert_close(fast(made).as_subclass(Tensor), MODEL(x), rtol=1e-4, atol=1e-5)


def test_expanded_zero_and_empty_tensors(fast: Deployed) -> None:
    x = torch.randn(1, FEATURES)
    check(fast, x.expand(4, -1))
    check(fast, torch.randn(4, 1).expand(-1, FEATURES))
    check(fast, torch._efficientzerotensor((4, FEATURES)), torch.zeros(4, FEATURES))
    assert fast(torch.zeros(0, FEATURES)).shape == (0, 10)


def freed(shape: tuple[int, ...], left: int, offset: int = 0, transposed: bool = False) -> Tensor:
    x = in_storage(torch.randn(shape), offset)
    x = x.t() if transposed else x
    x.untyped_storage().resize_(left)
    return x


FREED = {
    "freed": lambda: freed((4, FEATURES), 0),
    "freed, with an offset": lambda: freed((4, FEATURES), 0, 7),
    "cut short": lambda: freed((4, FEATURES), 4 * 4 * FEATURES - 4),
    "cut short, with an offset": lambda: freed((4, FEATURES), 4 * 4 * FEATURES, 1),
    "cut short, transposed": lambda: freed((FEATURES, 4), 4 * 4 * FEATURES - 4, transposed=True),
}


@pytest.mark.parametrize("kind", FREED)
def test_a_storage_that_is_too_small_is_refused(fast: Deployed, kind: str) -> None:
    fast(torch.randn(4, FEATURES))
    with pytest.raises(ValueError, match=r"expected a storage of at least \d+ bytes .* got \d+: it was freed"):
        fast(FREED[kind]())


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "float64": (lambda: torch.zeros(4, FEATURES, dtype=torch.float64), r"expected torch.float32 .*float64.*convert"),
    "bfloat16": (lambda: torch.zeros(4, FEATURES, dtype=torch.bfloat16), r"expected torch.float32 .*bfloat16"),
    "complex": (lambda: torch.zeros(4, FEATURES, dtype=torch.complex64), r"expected torch.float32 .*complex64"),
    "conjugate": (lambda: torch.zeros(4, FEATURES, dtype=torch.complex64).conj(), r"expected torch.float32 .*complex"),
    "sparse": (lambda: torch.zeros(4, FEATURES).to_sparse(), r"expected a dense.*sparse_coo.*to_dense"),
    "csr": (lambda: torch.eye(4, FEATURES).to_sparse_csr(), r"expected a dense.*sparse_csr"),
    "mkldnn": (lambda: torch.zeros(4, FEATURES).to_mkldnn(), r"expected a dense.*mkldnn"),
    "quantized": (
        lambda: torch.quantize_per_tensor(torch.zeros(4, FEATURES), 0.1, 0, torch.qint8),
        r"expected torch.float32 .*qint8",
    ),
    "nested": (lambda: torch.nested.nested_tensor([torch.zeros(FEATURES)] * 4), r"expected a dense.*nested"),
    "jagged": (
        lambda: torch.nested.nested_tensor([torch.zeros(FEATURES)] * 4, layout=torch.jagged),
        r"expected a dense.*nested",
    ),
    "one sample": (lambda: torch.zeros(FEATURES), r"expected an input of shape \(-1, 100\).*got \(100,\)"),
    "wrong rank": (lambda: torch.zeros(4, FEATURES, 1), r"expected an input of shape \(-1, 100\)"),
    "wrong features": (lambda: torch.zeros(4, FEATURES + 1), r"expected an input of shape \(-1, 100\)"),
    "scalar": (lambda: torch.tensor(1.0), r"expected an input of shape \(-1, 100\)"),
    "none": (lambda: None, r"expected tensors, got a NoneType"),
    "list": (lambda: [[1.0] * FEATURES], r"expected tensors, got a float"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_read_is_refused_with_a_reason(fast: Deployed, kind: str) -> None:
    make, message = REFUSED[kind]
    fast(torch.randn(4, FEATURES))
    with pytest.raises((ValueError, TypeError), match=message):
        fast(make())
    with pytest.raises((ValueError, TypeError), match=message):
        fast.native.profile(make())


def test_the_number_of_inputs_is_checked(fast: Deployed) -> None:
    x = torch.randn(4, FEATURES)
    with pytest.raises(ValueError, match="expected 1 inputs, got 2; pass the same number as in the example"):
        fast(x, x)
    with pytest.raises(ValueError, match="expected 1 inputs, got 0"):
        fast()


# ------------------------------------------------------------------------------------- tracing, compiling, transforms


def test_fake_and_meta_tensors(fast: Deployed) -> None:
    real = torch.randn(4, FEATURES)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = fast(torch.empty(3, FEATURES))
        assert (fake.shape, fake.dtype, fake.device.type) == ((3, 10), torch.float32, "cpu")
        assert type(fast(real)) is type(fake)
    assert fast(mode.from_tensor(real)).shape == (4, 10)
    meta = fast(torch.empty(5, FEATURES, device="meta"))
    assert (meta.shape, meta.device.type) == ((5, 10), "meta")
    check(fast, real)
    with pytest.raises(ValueError, match=r"expected an input of shape \(-1, 100\)"):
        fast(torch.empty(5, FEATURES + 1, device="meta"))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_function_has_the_operator_in_its_graph(fast: Deployed, backend: str) -> None:
    torch._dynamo.reset()
    seen = torch._dynamo.testing.CompileCounterWithBackend(backend)
    compiled = torch.compile(lambda z: fast(z * 2) + 1, fullgraph=True, backend=seen)
    for batch in (4, 1, 7, 64):
        x = torch.randn(batch, FEATURES)
        torch.testing.assert_close(compiled(x), MODEL(2 * x).detach() + 1, rtol=1e-4, atol=1e-5)
    assert any("gossamer" in str(node.target) for graph in seen.graphs for node in graph.graph.nodes)
    assert seen.frame_count <= 3


def test_export_and_traces_record_the_call(fast: Deployed) -> None:
    class Around(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return fast(x).relu()

    x, other = torch.randn(4, FEATURES), torch.randn(4, FEATURES)
    want = MODEL(other).detach().relu()
    with torch.no_grad():
        runs = {
            "export": torch.export.export(Around(), (x,), strict=False).module(),
            "make_fx": torch.fx.experimental.proxy_tensor.make_fx(Around())(x),
            "trace": trace(Around(), x),
        }
        for name, run in runs.items():
            torch.testing.assert_close(run(other), want, rtol=1e-4, atol=1e-5, msg=name)


def trace(module: nn.Module, x: Tensor) -> Any:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.trace(module, (x,))


def test_vmap_runs_every_slice(fast: Deployed) -> None:
    x = torch.randn(3, 4, FEATURES)
    want = MODEL(x).detach()
    torch.testing.assert_close(torch.vmap(fast)(x), want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.vmap(fast, in_dims=1)(x.transpose(0, 1)), want, rtol=1e-4, atol=1e-5)
    nested = torch.vmap(torch.vmap(fast))(x[None])
    torch.testing.assert_close(nested[0], want, rtol=1e-4, atol=1e-5)
    constant = torch.vmap(lambda scale: fast(x[0]) * scale)(torch.ones(2))
    torch.testing.assert_close(constant[1], want[0], rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own use of it
def test_a_derivative_is_refused_and_no_input_is_tracked(fast: Deployed) -> None:
    x = torch.randn(4, FEATURES)
    for differentiate in (
        lambda: torch.func.grad(lambda z: fast(z).sum())(x),
        lambda: torch.func.jvp(fast, (x,), (x,)),
        lambda: torch.vmap(torch.func.grad(lambda z: fast(z[None]).sum()))(x),
        lambda: torch.func.jacrev(fast)(x),
    ):
        with pytest.raises(RuntimeError, match=r"expected inputs without derivatives.*differentiate the model"):
            differentiate()
    with torch.autograd.forward_ad.dual_level():
        check(fast, x)
        with pytest.raises(RuntimeError, match="expected inputs without derivatives"):
            fast(torch.autograd.forward_ad.make_dual(x, x))
    assert not fast(x.requires_grad_()).requires_grad


def test_functionalized_calls(fast: Deployed) -> None:
    x = torch.randn(4, FEATURES)
    got = torch.func.functionalize(lambda z: fast(z) + 1)(x)
    torch.testing.assert_close(got, MODEL(x).detach() + 1, rtol=1e-4, atol=1e-5)


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 6, batch_first=True)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> Any:
        return self.lstm(x, state)


def test_several_inputs_and_outputs_are_compiled_and_checked() -> None:
    torch.manual_seed(0)
    model = Both().eval()
    inputs = (torch.randn(3, 5, 8), (torch.randn(1, 3, 6), torch.randn(1, 3, 6)))
    native = compile_plan(model, inputs)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, state: native(x, state), fullgraph=True, backend="eager")
    with torch.no_grad():
        want = model(*inputs)
    for run in (native, compiled):
        torch.testing.assert_close(run(*inputs), want, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="expected a storage of at least"):
        native(inputs[0], (freed((1, 3, 6), 0), inputs[1][1]))
    with pytest.raises(ValueError, match=r"expected inputs of the same batch size, got \[2, 3\]"):
        native(inputs[0][:2], inputs[1])


def test_tokens_are_checked_like_floats() -> None:
    model = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 4)).eval()
    tokens = torch.randint(0, 20, (3, 5))
    native = compile_plan(model, tokens)
    with torch.no_grad():
        want = model(tokens)
    torch.testing.assert_close(native(tokens), want)
    torch.testing.assert_close(native(tokens.t().contiguous().t()), want)
    for wrong in (tokens + 20, tokens - 20):
        with pytest.raises(IndexError, match="outside"):
            native(wrong)
    with pytest.raises(ValueError, match=r"expected torch.int64 .* got torch.int32"):
        native(tokens.int())


# ------------------------------------------------------------------------------------------------ the life of a model


def test_a_model_that_is_gone_is_named() -> None:
    native = compile_plan(MODEL, torch.randn(2, FEATURES))
    name = native._name
    x = torch.randn(2, FEATURES)
    assert torch.ops.gossamer.run([x], name)[0].shape == (2, 10)
    del native
    gc.collect()
    with pytest.raises(RuntimeError, match=rf"expected '{name}' in this process, got no such model"):
        torch_op.find(name)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda fast: pickle.loads(pickle.dumps(fast))])
def test_copies_have_memory_of_their_own(copied: Callable[[Any], Any]) -> None:
    x = torch.randn(4, FEATURES)
    first = deployed.deploy(MODEL, x, seconds=0.05, remember=False)
    native = compile_plan(MODEL, x)
    for original in (first, native, SparseLinears(MODEL, by_native(load_native()))):
        other = copied(original)
        del original
        gc.collect()
        check(other, x)


def test_later_training_changes_nothing() -> None:
    model = copy.deepcopy(MODEL)
    x = torch.randn(64, FEATURES)
    native = compile_plan(model, x[:1])
    native(x[:1])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
            parameter.untyped_storage().resize_(0)
    check(native, x)  # another batch size: its plan is made now


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
class TestFork:
    """The child has none of the parent's threads, but the locks as they were at that moment."""

    def model(self) -> NativeModel:
        return NativeModel(capture(MODEL, (torch.randn(1, FEATURES),)), load_native(), Setting(16, threads=2))

    def child_succeeds(self, run: Callable[[], bool]) -> bool:
        child = os.fork()
        if child == 0:
            try:
                os._exit(0 if run() else 1)
            finally:
                os._exit(2)
        end = time.monotonic() + 20
        while time.monotonic() < end:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                return status == 0
            time.sleep(0.001)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return False

    def test_a_lock_that_another_thread_holds(self) -> None:
        native, x = self.model(), torch.randn(40, FEATURES)
        want = native(x)
        held, release = threading.Event(), threading.Event()

        def hold() -> None:
            with native._lock:
                held.set()
                release.wait(30)

        holder = threading.Thread(target=hold)
        holder.start()
        held.wait(30)
        succeeded = self.child_succeeds(lambda: torch.equal(native(x), want))
        release.set()
        holder.join()
        assert succeeded

    def test_forks_while_threads_are_inside_calls(self) -> None:
        native, x = self.model(), torch.randn(40, FEATURES)
        want = native(x)
        stop = threading.Event()

        def work() -> None:
            while not stop.is_set():
                native(x)

        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            assert all(self.child_succeeds(lambda: torch.equal(native(x), want)) for _ in range(FORKS))
        finally:
            stop.set()
            for thread in threads:
                thread.join()


def test_the_attack_that_corrupted_the_heap() -> None:
    code = """
import torch, gossamer
from torch import nn
m = nn.Sequential(nn.Linear(100, 300), nn.ReLU(), nn.Linear(300, 100)).eval()
with torch.no_grad():
    m[0].weight.mul_(torch.rand_like(m[0].weight) < 0.02)
    m[2].weight.mul_(torch.rand_like(m[2].weight) < 0.02)
fast = gossamer.deploy(m, torch.randn(1, 100), seconds=0.05, remember=False).native
x = torch.randn(64, 100)
want = m(x).detach()
for dtype in (torch.bfloat16, torch.float64, torch.float16):
    torch.set_default_dtype(dtype)
    for batch in (64, 63, 1):
        torch.testing.assert_close(fast(x[:batch]), want[:batch], rtol=1e-4, atol=1e-5)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
