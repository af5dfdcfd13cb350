"""The training loop on a GPU: captured and eager steps, no waiting in a step, going on, all the ways to compute."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from observers import Dies
from safetensors.torch import load_file
from torch import Tensor, nn

from gossamer.lab.data import ImageSet, TextSet
from gossamer.lab.training import LossNotFinite, Run, networks, train
from gossamer.lab.training.distributed import DistributedContext
from gossamer.lab.training.optimise import make_optimizer
from gossamer.lab.training.step import Meter, Step
from gossamer.lab.training.task import ImageTask
from gossamer.sparsifier import Sparsifier

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

IMAGES = Run(model="digits_cnn", data="digits", epochs=12, batch_size=8, log_steps=7, device="cuda")
SPARSE = IMAGES.with_settings(["method=scl", "sparsity=0.8"])
PAPER = IMAGES.with_settings(["method=scl", "decay=0.5", "leave_at=0.5", "preset=paper", "schedule=phases"])
TAUGHT = SPARSE.with_settings(["distil=0.5", "schedule=restart"])
WORDS = Run(
    model="lstm_lm",
    model_options={"hidden": 8, "dropout": 0.0},
    data="wikitext2",
    epochs=4,
    batch_size=4,
    bptt=7,
    lr=1.0,
    device="cuda",
)


@pytest.fixture
def linear(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """A network of products only, whose kernels add up in the same order every time; the argument is the dropout."""

    def use(dropout: float) -> None:
        def create(run: Run, num_classes: int) -> nn.Module:
            hidden = [nn.Linear(64, 40), nn.BatchNorm1d(40), nn.ReLU(), nn.Dropout(dropout)]
            return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(40, num_classes))

        monkeypatch.setattr(networks, "create", create)

    return use


def trained(run: Run, folder: Path, changes: list[str], **options: Any) -> dict[str, Tensor]:
    train(run.with_settings(changes), folder, **options)
    return load_file(folder / "model.safetensors")


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("run", [IMAGES, SPARSE, PAPER, TAUGHT], ids=["dense", "sparse", "paper", "taught"])
def test_captured_equals_eager(
    images: ImageSet, linear: Callable[[float], None], tmp_path: Path, run: Run, optimizer: str
) -> None:
    linear(0.3)
    run = run.with_settings([f"optimizer={optimizer}", "lr=0.02", "clip=1.0"])
    eager = trained(run, tmp_path / "eager", ["capture=false"])
    assert_same(trained(run, tmp_path / "captured", ["capture=true"]), eager)


def test_a_gpu_learns_what_a_cpu_does(images: ImageSet, linear: Callable[[float], None], tmp_path: Path) -> None:
    linear(0.0)
    run = SPARSE.with_settings(["epochs=3", "precision=float32"])
    on_cpu = trained(run, tmp_path / "cpu", ["device=cpu"])
    on_gpu = trained(run, tmp_path / "gpu", ["capture=true"])
    for name, tensor in on_cpu.items():
        torch.testing.assert_close(on_gpu[name], tensor, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_captured_language_model_learns_what_an_eager_one_does(text: TextSet, tmp_path: Path, share: float) -> None:
    run = WORDS.with_settings(["clip=0.25", "method=scl", "sparsity=0.5", "precision=float32", f"distil={share}"])
    eager = trained(run, tmp_path / "eager", ["capture=false"])
    captured = trained(run, tmp_path / "captured", ["capture=true"])
    for name, tensor in eager.items():
        torch.testing.assert_close(captured[name], tensor, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("workers", [0, 2])
def test_steps_on_an_image_folder_are_captured_while_others_prepare_its_images(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, workers: int
) -> None:
    image = pytest.importorskip("PIL.Image")
    generator = torch.Generator().manual_seed(0)
    for number in range(200):
        path = tmp_path / "images" / ("train" if number < 190 else "val") / f"{number % 3}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = torch.randint(256, (12, 10, 3), generator=generator, dtype=torch.uint8)
        image.fromarray(pixels.numpy()).save(path)
    monkeypatch.setattr(
        networks, "create", lambda run, classes: nn.Sequential(nn.Flatten(), nn.Linear(192, 40), nn.Linear(40, classes))
    )
    run = SPARSE.with_settings(
        ["data=imagefolder", f"data_root={tmp_path / 'images'}", "image_size=8", f"workers={workers}", "epochs=4"]
    )
    eager = trained(run, tmp_path / "eager", ["capture=false"])
    ended = threading.Event()

    def pin() -> None:
        """What the thread of a loader does now and then, all the time: have new memory from the driver."""
        held = []  # or torch would give the same memory again
        while not ended.is_set():
            held.append(torch.empty(4096, dtype=torch.uint8).pin_memory())

    beside = threading.Thread(target=pin)
    beside.start()
    try:
        assert_same(trained(run, tmp_path / "captured", ["capture=true"]), eager)
    finally:
        ended.set()
        beside.join()


@pytest.mark.parametrize("step", [7, 28, 42])
@pytest.mark.parametrize("capture", ["capture=false", "capture=true"])
def test_a_run_that_died_goes_on_to_the_same_bits(
    images: ImageSet, linear: Callable[[float], None], tmp_path: Path, capture: str, step: int
) -> None:
    linear(0.3)  # so that the generator of the GPU has to go on where it was
    changes = [capture, "checkpoint_steps=5"]
    whole = trained(SPARSE, tmp_path / "whole", changes)
    with pytest.raises(MemoryError):
        trained(SPARSE, tmp_path / "torn", changes, observers=[Dies(step)])
    assert_same(trained(SPARSE, tmp_path / "torn", changes), whole)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_run_begun_on_a_cpu_goes_on_on_a_gpu(
    images: ImageSet, linear: Callable[[float], None], tmp_path: Path, optimizer: str
) -> None:
    linear(0.0)
    run = SPARSE.with_settings([f"optimizer={optimizer}", "lr=0.01", "checkpoint_steps=5"])
    with pytest.raises(MemoryError):
        trained(run, tmp_path, ["device=cpu"], observers=[Dies(28)])
    found = train(run.with_settings(["capture=true"]), tmp_path)
    assert found["sparsity"] == pytest.approx(0.8, abs=0.001)
    assert found["hardware"]["device"] == "cuda"


@pytest.mark.parametrize(
    "changes",
    [
        ["precision=bf16"],
        ["precision=bf16", "channels_last=true"],
        ["precision=bf16", "channels_last=true", "capture=true"],
        ["precision=bf16", "channels_last=true", "compile=true", "capture=true"],
        ["precision=bf16", "channels_last=true", "compile=true", "capture=true", "distil=0.5"],
        ["compile=true"],
        ["settings.scale=per_sample"],
        ["settings.scale=batch", "capture=true"],
        ["sparsity=none", "flops=0.5", "capture=true"],
    ],
    ids=" ".join,
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # of the compiler's own parts
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")  # advice to compute less exactly
def test_all_ways_to_compute_train(images: ImageSet, tmp_path: Path, changes: list[str]) -> None:
    found = train(SPARSE.with_settings([*changes, "weight_decay=0.0"]), tmp_path)
    assert found["accuracy"] > 0.6
    if found["config"]["flops"] is None:
        assert found["sparsity"] == pytest.approx(0.8, abs=0.001)


@pytest.mark.parametrize("capture", ["capture=false", "capture=true"])
def test_the_first_bad_step_is_found_though_nobody_looked(
    images: ImageSet, linear: Callable[[float], None], tmp_path: Path, capture: str
) -> None:
    linear(0.0)
    run = IMAGES.with_settings([capture, "lr=1e30", "epochs=30", "precision=float32"])
    with pytest.raises(LossNotFinite, match=r"at step ([2-9]|1\d):"):
        train(run, tmp_path)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("capture", [False, True])
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_a_step_never_waits_for_the_gpu(images: ImageSet, sparse: bool, capture: bool) -> None:
    run = (SPARSE if sparse else IMAGES).with_settings([f"capture={capture}", "precision=bf16", "channels_last=true"])
    context = DistributedContext(torch.device("cuda"))
    task = ImageTask(run, context, images)
    model = networks.to_layout(networks.create(run, 3), run, context.device).train()
    optimizer = make_optimizer(run, model)
    phases = {"warmup": "0it", "sparsify": "500it", "stabilise": "0it"}
    sparsifier = Sparsifier(model, optimizer, sparsity=0.8, total_steps=1000, **phases) if sparse else None
    step = Step(run, context, task, model, optimizer, sparsifier, model, Meter(context, 0))
    batches = [batch for _ in range(6) for batch in task.source]
    for batch in batches[:8]:
        step(batch, 0.1)
    try:
        torch.cuda.set_sync_debug_mode("error")
        for batch in batches[8:]:
            step(batch, 0.05)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())
