"""Loops of accelerate in one process; test_two_processes.py has those in two."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor, nn
from torch.nn import functional as F

import gossamer

pytestmark = pytest.mark.filterwarnings("ignore")
STEPS, EXACT = 40, int(0.8 * 336 + 0.5)


@pytest.fixture(autouse=True)
def fresh_state() -> Iterator[None]:
    """Accelerators of one process share their state, such as its precision."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, 4))


def inputs_of(step: int) -> Tensor:
    return torch.randn(16, 10, generator=torch.Generator().manual_seed(step))


def zeros(model: nn.Module) -> int:
    return sum(int((each == 0).sum()) for each in model.parameters())


def train(
    accelerator: Accelerator,
    *,
    after: bool,
    parts: int = 1,
    dtype: torch.dtype = torch.float32,
    state: Path | None = None,
    first: int = 0,
) -> Any:
    """Train with the Sparsifier created before or after `prepare`; with `state`, save there in mid-run, or resume."""
    model: Any = network().to(dtype)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    asked: dict[str, Any] = {"sparsity": 0.8, "total_steps": STEPS}
    sparsifier = None if after else gossamer.Sparsifier(model, optimizer, **asked)
    model, optimizer = accelerator.prepare(model, optimizer)
    sparsifier = sparsifier or gossamer.Sparsifier(model, optimizer, **asked)
    accelerator.register_for_checkpointing(sparsifier)
    if first:
        accelerator.load_state(str(state))
        assert sparsifier.step == first
    for step in range(first, STEPS):
        if step == 17 and not first and state is not None:
            accelerator.save_state(str(state))
        for inputs in inputs_of(step).to(dtype).chunk(parts):
            with accelerator.accumulate(model):
                accelerator.backward(F.mse_loss(model(inputs), inputs[:, :4]))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
    assert sparsifier.step == STEPS
    sparsifier.finish()
    model = accelerator.unwrap_model(model)
    assert zeros(model) == EXACT
    return model


def test_before_and_after_prepare(tmp_path: Path) -> None:
    before, after = (train(Accelerator(cpu=True), after=after) for after in (False, True))
    assert all(torch.equal(*pair) for pair in zip(before.parameters(), after.parameters(), strict=True))


def test_a_registered_sparsifier_is_saved_and_resumed_bit_for_bit(tmp_path: Path) -> None:
    whole = train(Accelerator(cpu=True), after=True, state=tmp_path)
    resumed = train(Accelerator(cpu=True), after=True, state=tmp_path, first=17)
    assert all(torch.equal(*pair) for pair in zip(whole.parameters(), resumed.parameters(), strict=True))


def test_accumulated_batches_equal_the_large_batch() -> None:
    large = train(Accelerator(cpu=True), after=True, dtype=torch.float64)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    small = train(accelerator, after=True, parts=4, dtype=torch.float64)
    for one, two in zip(large.parameters(), small.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-12)


def test_bfloat16() -> None:
    train(Accelerator(cpu=True, mixed_precision="bf16"), after=True)
