"""LoRA on sparse bases, with the real library."""

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F

import gossamer
from gossamer.integrations.peft import merge
from integrations.test_transformers import network, trainer_of

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(10, 24), nn.Linear(24, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(inputs).relu())  # type: ignore[no-any-return]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 40) -> float:
    for step in range(steps):
        inputs = torch.randn(16, 10, generator=torch.Generator().manual_seed(step))
        loss = F.mse_loss(model(inputs), inputs[:, :4].square())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return float(loss.detach())


def sparse_base() -> Net:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with gossamer.Sparsifier(model, optimizer, sparsity=0.8, total_steps=40):
        train(model, optimizer)
    return model


def with_lora(model: nn.Module) -> Any:
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["first", "second"], r=2, lora_alpha=4))


def test_adapters_on_a_sparse_base_are_merged_under_its_masks() -> None:
    base = sparse_base()
    masks = gossamer.masks(base)
    model = with_lora(base)
    trained = [each for each in model.parameters() if each.requires_grad]
    train(model, torch.optim.Adam(trained, lr=1e-2))
    inputs = torch.randn(8, 10)
    before = model(inputs)
    merged = merge(model)
    assert isinstance(merged.model, Net)
    assert set(merged.lost) == {"first.weight", "second.weight"}
    assert all(0.3 < share < 1.0 for share in merged.lost.values())  # four fifths of the weights are pruned
    for name, mask in masks.items():
        weight = merged.model.get_parameter(name)
        assert not bool(weight[~mask].any())
        assert bool((weight[mask] != 0).all())
    assert not torch.allclose(before, merged.model(inputs))


def test_a_merge_without_zeros_loses_nothing() -> None:
    torch.manual_seed(0)
    model = with_lora(Net())
    train(model, torch.optim.Adam([each for each in model.parameters() if each.requires_grad], lr=1e-2), 5)
    inputs = torch.randn(8, 10)
    before = model(inputs)
    merged = merge(model)
    assert set(merged.lost.values()) == {0.0}
    torch.testing.assert_close(before, merged.model(inputs))


def test_zeros_of_the_base_are_kept_while_everything_trains() -> None:
    base = sparse_base()
    zeros = int((base.first.weight == 0).sum())
    model = with_lora(base)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    with pytest.warns(UserWarning, match="zero everywhere, which looks like a layer that was initialized"):
        kept = gossamer.keep_zeros(model, optimizer)
    with kept:
        train(model, optimizer)
    layer = model.get_base_model().first
    assert int((layer.base_layer.weight == 0).sum()) == zeros
    assert int((layer.lora_B["default"].weight != 0).sum()) > 24  # units of the base may be dead


def test_the_base_is_made_sparse_while_adapters_train_beside_it() -> None:
    torch.manual_seed(0)
    model = with_lora(Net())
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    with gossamer.Sparsifier(model, optimizer, sparsity=0.8, total_steps=40, exclude="*lora_*") as sparsifier:
        train(model, optimizer)
    assert len(sparsifier.weights) == 2
    merged = merge(model)
    zeros = sum(int((weight == 0).sum()) for name, weight in merged.model.named_parameters() if "weight" in name)
    assert zeros == int(0.8 * (240 + 96) + 0.5)


def test_a_sparsifier_of_adapters_alone_is_noticed() -> None:
    """The base is frozen under LoRA, so that the target would hold for the adapters."""
    model = with_lora(Net())
    optimizer = torch.optim.Adam([each for each in model.parameters() if each.requires_grad], lr=1e-2)
    with pytest.warns(UserWarning, match=r"the 124 weights in training, such as .*lora_A.*, while 336 others"):
        gossamer.Sparsifier(model, optimizer, sparsity=0.8, total_steps=40)


def test_adapters_on_a_sparse_base_in_the_trainer(tmp_path: Path) -> None:
    model = network()
    encoder = [weight.name for weight in gossamer.select(model, include="*.encoder.*")]
    gossamer.impose(model, {name: torch.rand(model.get_parameter(name).shape) < 0.2 for name in encoder})
    masks = gossamer.masks(model, include="*.encoder.*")
    before = copy.deepcopy(model.state_dict())
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(target_modules=["query", "value"], modules_to_save=["classifier"], r=2, lora_alpha=16)
    )
    trainer_of(transformers.Trainer, adapted, tmp_path, learning_rate=1e-2).train()
    merged = merge(adapted)
    assert len(merged.lost) == 4  # query and value of two layers
    for name, mask in masks.items():
        weight = merged.model.get_parameter(name)
        assert not bool(weight[~mask].any())
        changed = "query" in name or "value" in name
        assert torch.equal(weight, before[name]) is not changed
    assert not torch.equal(merged.model.classifier.weight, before["classifier.weight"])


def test_a_model_without_adapters_is_refused() -> None:
    class Plain(nn.Module):
        def get_base_model(self) -> nn.Module:
            return Net()

    with pytest.raises(ValueError, match="expected a PEFT model with adapters on its layers"):
        merge(Plain())
