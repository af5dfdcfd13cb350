"""Counts of the report against NumPy, and its table, JSON and LaTeX."""

import io
import json

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from gossamer.report import Report, report


def zero_some_(model: nn.Module, share: float = 0.7, seed: int = 0) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(torch.rand(parameter.shape, generator=generator) > share)
    return model


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, padding=1, groups=3)
        self.up = nn.ConvTranspose2d(6, 4, 2, stride=2, groups=2)
        self.norm = nn.BatchNorm2d(4)
        self.head_one = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head_one(self.norm(self.up(self.conv(x))).mean(dim=(2, 3)))


def test_counts_agree_with_numpy() -> None:
    model = zero_some_(Net(), 0.8)
    with torch.no_grad():
        model.conv.weight[1] = 0
        model.up.weight[3:, 1] = 0  # kills the second feature of the second group only
        model.up.weight[:3, 1] = 1
    result = report(model)
    arrays = {name: each.detach().numpy() for name, each in model.named_parameters()}
    for row in result.rows:
        array = arrays[row.name]
        assert (row.weights, row.nonzeros) == (array.size, np.count_nonzero(array))
        assert row.density == pytest.approx(np.count_nonzero(array) / array.size)
        assert row.shape == array.shape
        assert (row.flops_dense, row.flops_sparse) == (None, None)
    conv, up, head = result.rows
    assert [row.name for row in result.rows] == ["conv.weight", "up.weight", "head_one.weight"]
    assert (conv.type, up.type, head.type) == ("Conv2d", "ConvTranspose2d", "Linear")
    assert (conv.features, conv.dead_features) == (
        6,
        sum(not arrays["conv.weight"][feature].any() for feature in range(6)),
    )
    by_group = [(group, feature) for group in range(2) for feature in range(2)]
    dead = [not arrays["up.weight"][3 * g : 3 * g + 3, feature].any() for g, feature in by_group]
    assert dead[3]
    assert (up.features, up.dead_features) == (4, sum(dead))
    total = sum(array.size for name, array in arrays.items() if name in {row.name for row in result.rows})
    kept = sum(row.nonzeros for row in result.rows)
    assert (result.weights, result.nonzeros) == (total, kept)
    assert result.sparsity == pytest.approx(1 - kept / total)
    assert result.flops_reduction is None


def test_flops_by_hand() -> None:
    model = zero_some_(Net())
    result = report(model, torch.randn(2, 3, 8, 8))
    places = {"conv.weight": 8 * 8, "up.weight": 8 * 8, "head_one.weight": 1}
    for row in result.rows:
        assert row.flops_dense == 2 * places[row.name] * row.weights
        assert row.flops_sparse == 2 * places[row.name] * row.nonzeros
    dense = sum(2 * places[row.name] * row.weights for row in result.rows)
    sparse = sum(2 * places[row.name] * row.nonzeros for row in result.rows)
    assert result.flops_reduction == pytest.approx(1 - sparse / dense)
    assert (result.total.flops_dense, result.total.flops_sparse) == (dense, sparse)


def test_tied_and_frozen_tensors_have_one_row_each() -> None:
    embedding, decoder = nn.Embedding(7, 3), nn.Linear(3, 7)
    decoder.weight = embedding.weight
    model = nn.ModuleList([embedding, decoder]).requires_grad_(False)
    (row,) = report(model).rows
    assert (row.name, row.type, row.weights) == ("0.weight", "Embedding", 21)


def test_selection_and_the_names_of_derived_layers() -> None:
    attention = nn.MultiheadAttention(4, 2)
    assert [row.type for row in report(attention).rows] == ["MultiheadAttention", "Linear"]
    assert [row.name for row in report(attention, exclude="out_proj").rows] == ["in_proj_weight"]


def test_dead_network() -> None:
    model = nn.Linear(3, 4)
    nn.init.zeros_(model.weight)
    result = report(model, torch.ones(1, 3))
    assert (result.sparsity, result.flops_reduction, result.total.dead_features) == (1.0, 1.0, 4)


def test_embedding_alone_has_no_flops_to_reduce() -> None:
    assert report(nn.Embedding(4, 2), torch.tensor([1])).flops_reduction is None


def test_model_and_parameters_are_only_read() -> None:
    model = Net().train()
    before = [(id(each), each._version) for each in model.parameters()]
    report(model, torch.randn(2, 3, 8, 8))
    assert before == [(id(each), each._version) for each in model.parameters()]
    assert model.norm.training
    torch.testing.assert_close(model.norm.running_mean, torch.zeros(4), rtol=0, atol=0)


def test_weights_without_values_count_as_nonzeros() -> None:
    with torch.device("meta"):
        on_meta, example = Net(), torch.empty(1, 3, 8, 8)
    assert report(on_meta, example) == report(Net(), torch.randn(1, 3, 8, 8))


@pytest.fixture
def example() -> Report:
    return report(zero_some_(Net()), torch.randn(1, 3, 8, 8))


def test_json_round_trip(example: Report) -> None:
    read = json.loads(example.to_json())
    assert read == example.to_dict()
    assert read["rows"][0]["shape"] == [6, 1, 3, 3]
    assert read["rows"][0]["density"] == example.rows[0].density
    assert read["total"]["nonzeros"] == read["nonzeros"] == example.nonzeros


def test_text_is_whole_wherever_it_goes(example: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    lines = str(example).splitlines()
    for row in example.rows:
        (line,) = [line for line in lines if row.name in line]
        assert f"{row.nonzeros:,}" in line
        assert " x ".join(map(str, row.shape)) in line
    assert f"{example.nonzeros:,}" in lines[-1]
    assert f"{1 - example.sparsity:.2%}" in lines[-1]
    assert "\x1b" not in str(example)


def test_names_are_never_read_as_markup() -> None:
    text = str(report(nn.ModuleDict({"[bold]": nn.Linear(2, 2)})))
    assert "[bold].weight" in text


def test_rich_shows_the_table(example: Report) -> None:
    console = Console(file=io.StringIO(), width=200)
    console.print(example)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "head_one.weight" in shown
    assert "sparse FLOPs" in shown


def test_latex_is_escaped_booktabs(example: Report) -> None:
    lines = example.to_latex().splitlines()
    assert lines[0] == r"\begin{tabular}{llrrrrrrr}"
    assert [lines[1], lines[3], lines[-4], lines[-2]] == [
        r"\toprule",
        r"\midrule",
        r"\midrule",
        r"\bottomrule",
    ]
    body = [line for line in lines if line.endswith(r"\\")]
    assert len(body) == len(example.rows) + 2
    assert all(line.count(" & ") == 8 for line in body)
    assert body[3].startswith(r"head\_one.weight & Linear & 5 x 4 & 20 & ")
    assert all(r"\%" in line for line in body[1:])
