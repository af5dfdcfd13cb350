"""Damaged states, records and run files are errors with a sentence, never a KeyError or an error of markup."""

from __future__ import annotations

import copy
import io
import json
import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from fuzz.mutate import mutated_json
from rich.console import Console
from torch import nn

import gossamer
from gossamer.lab import tables
from gossamer.lab.results import comparison_page
from gossamer.lab.results.records import read_record
from gossamer.lab.training.result import LAYERS, RESULT, check_result, read_layers, read_result_file
from gossamer.lab.training.run import Run
from gossamer.report import report

RESULTS = {
    "accuracy": 0.9,
    "validation_accuracy": None,
    "sparsity": 0.5,
    "nonzeros": 5,
    "weights": 10,
    "seconds": 3.5,
}


def training(method: str) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sparsifier = gossamer.Sparsifier(model, optimizer, method=method, sparsity=0.5, total_steps=20, min_density=0.1)
    return model, optimizer, sparsifier


def state_after(method: str, steps: int) -> dict[str, Any]:
    model, optimizer, sparsifier = training(method)
    for _ in range(steps):
        model(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return copy.deepcopy(sparsifier.state_dict())


@pytest.mark.parametrize("steps", [0, 12, 20])
@pytest.mark.parametrize("method", ["scl", "dpf", "rigl", "str"])
def test_a_damaged_state_is_loaded_or_refused_with_a_sentence(method: str, steps: int) -> None:
    state, rng, told = state_after(method, steps), random.Random(0), []
    for _ in range(150):
        damaged = mutated_json(state, rng)
        sparsifier = training(method)[2]
        try:
            sparsifier.load_state_dict(damaged)
        except ValueError as error:
            told.append(str(error))
    assert len(told) > 50
    assert all(told)
    training(method)[2].load_state_dict(state)


def shown(table: Any) -> str:
    console = Console(file=io.StringIO(), width=300)  # with markup, as a user's own would be
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_brackets_in_names_are_shown_as_they_are() -> None:
    name = "runs/[/bold][red]a[/]"
    assert name in shown(tables.of_results([(name, RESULTS), (name, RESULTS | {"diverged": True})]))
    assert name in shown(tables.of_rows([name, "test"], [[name, "1"]], title=name))
    found = report(nn.ModuleDict({"[/x]": nn.Linear(2, 2)}))
    assert "[/x]" in shown(found)
    assert "[/x]" in shown(found.table(name))


def test_a_damaged_result_is_refused_with_a_sentence(tmp_path: Path) -> None:
    rng, told = random.Random(0), []
    for number in range(400):
        damaged = mutated_json(RESULTS | {"config": {"seed": 1}, "diverged": False, "train_loss": 0.5}, rng)
        (tmp_path / RESULT).write_text(json.dumps(damaged))
        try:
            found = read_result_file(tmp_path)
            shown(tables.of_results([(str(number), found)]))
        except ValueError as error:
            told.append(str(error))
    assert len(told) > 100
    assert all("expected" in each and "got" in each for each in told)
    with pytest.raises(ValueError, match=r"a number for each of accuracy in .*, got accuracy = '0\.9': delete it"):
        check_result(RESULTS | {"accuracy": "0.9"}, tmp_path / RESULT)


def test_damaged_layers_are_refused_with_a_sentence(tmp_path: Path) -> None:
    whole = report(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), torch.randn(1, 4)).to_dict()
    rng, told = random.Random(0), []
    for _ in range(300):
        (tmp_path / LAYERS).write_text(json.dumps(mutated_json(whole, rng)))
        try:
            shown(read_layers(tmp_path).table("x"))
        except ValueError as error:
            told.append(str(error))
    assert len(told) > 50
    assert all("expected" in each for each in told)


def test_a_damaged_record_is_refused_with_a_sentence(tmp_path: Path) -> None:
    run = Run(method="scl", sparsity=0.5)
    whole = RESULTS | {"run_id": run.run_id, "config": run.to_dict(), "diverged": False, "train_loss": 0.5}
    whole |= {"tier": "final", "seed": 0, "options": asdict(run.options), "hardware": {"device": "cpu"}}
    path = tmp_path / "a.json"
    path.write_text(json.dumps(whole))
    assert comparison_page([read_record(path)], "final")
    for name, value, message in (
        ("accuracy", "high", "accuracy = 'high'"),
        ("seed", None, "seed = None"),
        ("options", [1], "options = "),
        ("hardware", "a GPU", "hardware = 'a GPU'"),
        ("config", {"epochs": "many"}, "epochs: expected"),
        ("config", {"model": 3}, "model: expected"),
    ):
        path.write_text(json.dumps(whole | {name: value}))
        with pytest.raises(ValueError, match=f"{message}.*delete it") as error:
            read_record(path)
        assert str(path) in str(error.value)
