"""The same trainings in two processes: accelerate, Lightning and the Trainer of Hugging Face."""

import os
import warnings
from pathlib import Path
from typing import Any

import conftest  # noqa: F401  the operators of torchvision, which the libraries import
import torch
from accelerate import Accelerator
from distributed.processes import Job
from lightning.pytorch import Trainer
from torch import Tensor, nn

import gossamer
from gossamer.integrations.lightning import SparsifierCallback
from gossamer.integrations.transformers import SparsifierCallback as TrainerSparsifierCallback
from integrations import test_lightning, test_transformers

STEPS = 40
Result = dict[str, Any]


def _as_a_launcher_does(rank: int) -> None:
    """The environment of a process that torchrun has started."""
    warnings.simplefilter("ignore")  # those of the libraries
    told = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    os.environ.update({name: str(value) for name, value in told.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500", TORCHELASTIC_RUN_ID="test")


def _learned(model: nn.Module, sparsifier: gossamer.Sparsifier | None) -> Result:
    assert sparsifier is not None
    weights = {weight.name: model.get_parameter(weight.name).detach().clone() for weight in sparsifier.weights}
    return {"weights": weights, "steps": sparsifier.step, "planned": sparsifier.plan.total}


def inputs_of(step: int) -> Tensor:
    return torch.randn(16, 10, generator=torch.Generator().manual_seed(step)).double()


def with_accelerate(*, after: bool, state: Path | None = None, first: int = 0) -> Result:
    """Train with the Sparsifier created before or after `prepare`; with `state`, save there in mid-run, or resume."""
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, 4)).double()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    asked: dict[str, Any] = {"sparsity": 0.8, "total_steps": STEPS}
    sparsifier = None if after else gossamer.Sparsifier(model, optimizer, **asked)
    model, optimizer = accelerator.prepare(model, optimizer)
    if sparsifier is None:
        sparsifier = gossamer.Sparsifier(model, optimizer, **asked)
    accelerator.register_for_checkpointing(sparsifier)
    if first:
        accelerator.load_state(str(state))
        assert sparsifier.step == first
    for step in range(first, STEPS):
        if state is not None and step == STEPS // 2 and not first:
            accelerator.save_state(str(state))
        share = 16 // accelerator.num_processes
        inputs = inputs_of(step)[accelerator.process_index * share :][:share]
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.mse_loss(model(inputs), inputs[:, :4]))
            optimizer.step()
            optimizer.zero_grad()
    sparsifier.finish()
    return _learned(accelerator.unwrap_model(model), sparsifier)


def _accelerate(rank: int, folder: Path, after: bool) -> Result:
    _as_a_launcher_does(rank)
    whole = with_accelerate(after=after, state=folder / "state")
    return {"whole": whole, "resumed": with_accelerate(after=after, state=folder / "state", first=20)}


def _lightning(rank: int, folder: Path) -> Result:
    _as_a_launcher_does(rank)
    callback, model = SparsifierCallback(sparsity=0.9), test_lightning.Net()
    trainer = Trainer(
        max_epochs=8, accelerator="cpu", strategy="ddp", devices=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder, callbacks=[callback],
    )  # fmt: skip
    trainer.fit(model, test_lightning.data(), test_lightning.data())
    assert trainer.world_size == 2
    return _learned(model, callback.sparsifier)


def _transformers(rank: int, folder: Path) -> Result:
    _as_a_launcher_does(rank)
    callback = TrainerSparsifierCallback(sparsity=0.9)
    model, trainer = test_transformers.train(
        folder, callback, max_steps=-1, num_train_epochs=8, logging_steps=1, gradient_accumulation_steps=2
    )
    assert trainer.args.world_size == 2
    return _learned(model, callback.sparsifier)


JOBS: dict[str, Job] = {
    "accelerate before prepare": (_accelerate, (False,)),
    "accelerate after prepare": (_accelerate, (True,)),
    "lightning": (_lightning, ()),
    "transformers": (_transformers, ()),
}
