"""The ImageNet recipes from the first step to the result, on a few real images and from scratch."""

import tarfile
from pathlib import Path

import pytest
from safetensors.torch import load_file

from gossamer.lab import models
from gossamer.lab.batched.sweeps import layout_of
from gossamer.lab.data.locate import search_folders
from gossamer.lab.recipes import find
from gossamer.lab.training import Run, train
from gossamer.methods import Request
from gossamer.methods.gradual_per_layer import final_sparsities

ARCHIVE = "imagenette-mini.tar"
pytest.importorskip("PIL.Image")


@pytest.fixture(scope="module")
def few_images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two training images and one of the validation set of each of the ten classes."""
    found = [folder / ARCHIVE for folder in search_folders() if (folder / ARCHIVE).is_file()]
    if not found:
        pytest.skip("imagenette-mini is in none of the folders for data sets")
    root = tmp_path_factory.mktemp("imagenette")
    taken: dict[str, int] = {}
    with tarfile.open(found[0]) as archive:
        for member in archive:
            folder = str(Path(member.name).parent)
            most = 2 if "/train/" in member.name else 1
            if member.isfile() and taken.get(folder, 0) < most:
                taken[folder] = taken.get(folder, 0) + 1
                archive.extract(member, root, filter="data")
    assert sum(taken.values()) == 30
    return root / "imagenette-mini"


@pytest.mark.usefixtures("torchvision_or_skip")
@pytest.mark.parametrize("name", ["imagenet-resnet50", "imagenet-efficientnet-b0", "imagenet-efficientnet-b0-zhu-3"])
def test_a_recipe_ends_at_its_sparsity(tmp_path: Path, few_images: Path, name: str) -> None:
    recipe = find(name)
    changes = ["batch_size=10", "epochs=3", "image_size=32", "workers=0", "device=cpu", f"data_root={few_images}"]
    run = recipe.run.with_settings(changes)
    run = Run.from_dict({**run.to_dict(), "model_options": {"pretrained": False}})  # no download of weights
    result = train(run, tmp_path / "run")
    assert result["complete"]
    assert result["sparsity"] == pytest.approx(recipe.run.sparsity, abs=1e-6)
    tensors = load_file(tmp_path / "run" / "model.safetensors")
    pruned = sum(int((tensor == 0).sum()) for tensor in tensors.values() if tensor.dim() > 1)
    total = sum(tensor.numel() for tensor in tensors.values() if tensor.dim() > 1)
    assert pruned / total == pytest.approx(result["sparsity"], abs=1e-3)
    assert train(run, tmp_path / "run") == result  # a finished run is not trained again


@pytest.mark.usefixtures("torchvision_or_skip")
@pytest.mark.parametrize(("number", "convolutions", "sparsity"), [(1, 0.2, 0.195), (2, 0.5, 0.497), (3, 0.5, 0.509)])
def test_policies_of_zhu_leave_convolutions_what_the_paper_prunes(
    number: int, convolutions: float, sparsity: float
) -> None:
    """The network's sparsity is near that in the table of the paper, which counts other parameters, too."""
    run = find(f"imagenet-efficientnet-b0-zhu-{number}").run
    network = models.create("efficientnet_b0", num_classes=1000, pretrained=False)
    layout = layout_of(network)
    request = Request(run.sparsity or 0.0, 0, run.options)
    found = dict(zip(layout.names, final_sparsities(layout, request), strict=True))
    assert found["features.8.0.weight"] == pytest.approx(convolutions, abs=1e-5)
    assert found["features.1.0.block.0.0.weight"] == run.settings["depthwise"]
    assert found["classifier.1.weight"] == run.settings["linear"]
    assert run.sparsity == pytest.approx(sparsity, abs=0.004)
