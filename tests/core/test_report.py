"""Counts of the report against NumPy, and its table, JSON and LaTeX."""

import copy
import io
import json
import pickle

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn.utils import prune

from gossamer.report import Report, report
from gossamer.report.terminal import bar, fold


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
        (line,) = [line for line in lines if row.name.removesuffix(".weight") in line]
        assert f"{row.nonzeros:,}" in line
        assert f"{row.density:.1%}" in line
    (line,) = [line for line in lines if "total" in line]
    assert f"{example.nonzeros:,}" in line
    assert f"{example.sparsity:.2%} sparse" in lines[-1]
    assert "\x1b" not in str(example)


def test_names_are_never_read_as_markup() -> None:
    text = str(report(nn.ModuleDict({"[bold]": nn.Linear(2, 2)})))
    assert "[bold]" in text


def test_rich_shows_the_table(example: Report) -> None:
    console = Console(file=io.StringIO(), width=200)
    console.print(example)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "head_one" in shown
    assert "FLOPs" in shown


def blocks(count: int, width: int = 8) -> nn.Module:
    """A network with repeated blocks, as transformers have them."""

    def block() -> nn.Module:
        attention = nn.ModuleDict({name: nn.Linear(width, width) for name in ("query", "key", "value")})
        experts = nn.ModuleList(nn.Linear(width, 2 * width) for _ in range(4))
        return nn.ModuleDict({"attention": nn.ModuleDict({"self": attention}), "experts": experts})

    return nn.ModuleDict({"encoder": nn.ModuleList(block() for _ in range(count)), "head": nn.Linear(width, 3)})


def test_repeated_blocks_have_one_line_of_at_most_80_columns() -> None:
    result = report(blocks(12))
    lines = str(result).splitlines()
    assert max(map(len, lines)) <= 80
    assert len(result.rows) == 12 * 7 + 1
    text = "".join(line.split()[0] for line in lines if line.strip())
    for name in ("encoder.{0..11}.attention.self.query", "encoder.{0..11}.experts.{0..3}", "head"):
        assert name in text
    folded = fold(result.rows)
    assert [len(each.rows) for each in folded] == [12, 12, 12, 48, 1]
    assert sum(each.total.nonzeros for each in folded) == result.nonzeros
    assert [each.total.weights for each in folded] == [768, 768, 768, 6144, 24]


def test_blocks_of_other_shapes_and_pairs_stay_apart() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3), nn.Linear(3, 4))
    assert [each.name for each in fold(report(model).rows)] == [f"{index}.weight" for index in range(4)]
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)), nn.Linear(4, 3), nn.Linear(3, 4), nn.Linear(4, 4))
    assert [each.name for each in fold(report(model).rows)] == ["{0,1,2,5}.weight", "3.weight", "4.weight"]


def test_names_longer_than_the_terminal_are_broken_between_their_parts() -> None:
    inner: nn.Module = nn.Linear(2, 2)
    for part in ("projection_of_the_output", "self_attention", "decoder_layer", "transformer", "backbone"):
        inner = nn.ModuleDict({part: inner})
    lines = str(report(inner)).splitlines()
    assert max(map(len, lines)) <= 80
    assert "projection_of_the_output" in "\n".join(lines)


@pytest.mark.parametrize(
    ("density", "shown"), [(0.0, "      "), (1e-9, "▏     "), (0.5, "███   "), (0.97, "█████▉"), (1.0, "██████")]
)
def test_a_bar_is_full_at_one_and_shows_everything_above_zero(density: float, shown: str) -> None:
    assert bar(density) == shown


def test_weights_pruned_by_torch_count_as_their_product() -> None:
    model = zero_some_(Net(), 0.0)
    prune.l1_unstructured(model.conv, "weight", 0.5)
    prune.ln_structured(model.head_one, "weight", 2, n=2, dim=0)
    model(torch.randn(1, 3, 8, 8))
    hidden = report(model, torch.randn(1, 3, 8, 8))
    prune.remove(model.conv, "weight")
    prune.remove(model.head_one, "weight")
    plain = report(model, torch.randn(1, 3, 8, 8))
    assert sorted(hidden.rows, key=lambda row: row.name) == sorted(plain.rows, key=lambda row: row.name)
    assert next(row for row in hidden.rows if row.name == "conv.weight").nonzeros == 27
    prune.l1_unstructured(model.conv, "weight", 0.5)
    assert [row.name for row in report(model, include="conv").rows] == ["conv.weight"]


def test_a_state_dict_has_the_rows_of_its_model() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 5), nn.LSTM(5, 6))
    zero_some_(model, 0.8)
    of_model, of_tensors = report(model), report(model.state_dict())
    numbers = [(row.name, row.shape, row.nonzeros, row.features, row.dead_features) for row in of_model.rows]
    assert numbers == [(row.name, row.shape, row.nonzeros, row.features, row.dead_features) for row in of_tensors.rows]
    assert {row.type for row in of_tensors.rows} == {"filters", "matrix"}
    assert [row.name for row in report(model.state_dict(), include="4.*", exclude="*hh*").rows] == ["4.weight_ih_l0"]


def test_state_dicts_without_weights_or_with_requests_for_a_model() -> None:
    with pytest.raises(ValueError, match="expected floating-point tensors of two or more dimensions, got none"):
        report({"bias": torch.ones(2, 2), "steps": torch.ones(2, 2, dtype=torch.int64)})
    with pytest.raises(TypeError, match="FLOPs need the model itself"):
        report({"weight": torch.ones(2, 2)}, torch.ones(1, 2))
    with pytest.raises(TypeError, match="expected name patterns for a state dict"):
        report({"weight": torch.ones(2, 2)}, include=nn.Linear)
    with pytest.raises(TypeError, match=r"expected a torch.nn.Module or a state dict, got int"):
        report(3)  # type: ignore[arg-type]


def test_copies_and_pickles_have_no_tensors(example: Report) -> None:
    assert example.tensors
    for copied in (copy.deepcopy(example), pickle.loads(pickle.dumps(example))):
        assert copied == example
        assert not copied.tensors


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
