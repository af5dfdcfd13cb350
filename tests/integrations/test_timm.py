"""The pattern of timm's training script: its optimizers, schedules, scaler, averaged weights and checkpoints."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gossamer

timm = pytest.importorskip("timm", reason="pip install timm")
pytest.importorskip("timm.optim")
EPOCHS, UPDATES, BATCH = 4, 6, 8


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    labels = torch.randint(4, (BATCH,), generator=generator)
    images = torch.randn(BATCH, 3, 32, 32, generator=generator)
    images[torch.arange(BATCH), 0, :8, :8] += labels[:, None, None]
    return images, labels


def create(name: str) -> nn.Module:
    torch.manual_seed(0)
    options = {"img_size": 32} if "vit" in name else {}
    model: nn.Module = timm.create_model(name, num_classes=4, **options)
    return model


def train(name: str, *, folder: Path | None = None, resume: bool = False) -> tuple[nn.Module, Any]:
    """A run of the script; with `folder`, it saves there after two epochs, or resumes."""
    from timm.models import resume_checkpoint
    from timm.optim import create_optimizer_v2
    from timm.scheduler import create_scheduler_v2
    from timm.utils import CheckpointSaver, ModelEmaV3, NativeScaler

    model = create(name)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05, layer_decay=0.9)
    average, scaler = ModelEmaV3(model, decay=0.8), NativeScaler("cpu")
    schedule, _ = create_scheduler_v2(optimizer, "cosine", num_epochs=EPOCHS, updates_per_epoch=UPDATES)
    sparsifier = gossamer.Sparsifier(model, optimizer, sparsity=0.8, total_steps=EPOCHS * UPDATES)
    first = 0
    if resume and folder is not None:
        first = resume_checkpoint(model, str(folder / "last.pth.tar"), optimizer=optimizer, loss_scaler=scaler)
        sparsifier.load_state_dict(torch.load(folder / "sparsifier.pt", weights_only=True))
        schedule.step(first)
    for epoch in range(first, EPOCHS):
        for step in range(UPDATES):
            optimizer.zero_grad()
            images, labels = batch(UPDATES * epoch + step)
            scaler(F.cross_entropy(model(images), labels), optimizer, clip_grad=1.0, parameters=model.parameters())
            average.update(model)
        schedule.step(epoch + 1)
        if folder is not None and epoch == 1:
            saver = CheckpointSaver(model, optimizer, amp_scaler=scaler, checkpoint_dir=str(folder))
            saver.save_checkpoint(epoch)
            torch.save(sparsifier.state_dict(), folder / "sparsifier.pt")
    sparsifier.finish()
    sparsifier.impose(average.module)
    return model, average.module


def zeros(model: nn.Module) -> tuple[int, int]:
    weights = [each.parameter for each in gossamer.select(model, for_training=False)]
    return sum(int((each == 0).sum()) for each in weights), sum(each.numel() for each in weights)


@pytest.mark.parametrize("name", ["test_vit", "test_resnet"])
def test_a_training_and_its_average_end_at_the_target(name: str) -> None:
    for model in train(name):
        found, total = zeros(model)
        assert found == int(0.8 * total + 0.5)


def test_a_run_resumes_bit_for_bit(tmp_path: Path) -> None:
    whole, _ = train("test_vit", folder=tmp_path)
    resumed, _ = train("test_vit", folder=tmp_path, resume=True)
    assert all(torch.equal(*pair) for pair in zip(whole.parameters(), resumed.parameters(), strict=True))
