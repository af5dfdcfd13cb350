"""The accuracy of one trained network at every sparsity: its weights ordered once, and cut at many places.

Mask variables order all weights of a network by how much it needs them, so thresholding them gives a network of any
sparsity. Its batch-norm statistics are recalibrated on training batches, and nothing else is trained. A network trained
for a sparsity is better than one that is cut to it, and the more so the further the cut is from where it was trained:
the gap to trained networks is part of the result.

The order comes from the mask variables as they were before the last step in which masks were trained
(``gossamer train --keep-mask-variables``). Without them, magnitudes of the final weights stand in. These cannot give
back what is pruned, so their curve begins at the sparsity of the run.
"""

import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

from gossamer.io.container import is_count
from gossamer.io.sparse_file import load
from gossamer.lab.json_files import read_object
from gossamer.lab.training import mask_variables, modes, networks
from gossamer.lab.training.distributed import join
from gossamer.lab.training.mask_variables import MASK_VARIABLES
from gossamer.lab.training.result import MODEL, RUN, check_folder, is_number, read_result_file, read_run
from gossamer.lab.training.task import Task, make_task
from gossamer.prunable import select
from gossamer.zeros import impose

FRONTIER = "frontier.json"
SPARSITIES = (0.0, 0.5, 0.7, 0.8, 0.85, 0.9, 0.93, 0.95, 0.97, 0.98, 0.99)
WITHIN = 0.01  # of the best accuracy, at the knee
_ALIKE = ("model", "data", "method", "epochs")
_CALIBRATION = 200  # batches
_MOST_POINTS = 10_000


@dataclass(frozen=True)
class Point:
    """The network at one sparsity. Accuracies are shares."""

    sparsity: float
    test: float
    validation: float | None
    trained: float | None
    """Mean test accuracy of networks that were trained for this sparsity."""
    runs: int
    """The number of those."""

    @property
    def gap(self) -> float | None:
        """By how much training for this sparsity is better than cutting to it."""
        return None if self.trained is None else self.trained - self.test


@dataclass(frozen=True)
class Frontier:
    """The points, by rising sparsity."""

    order: str
    """What the weights are ordered by: mask variables, or magnitudes (of methods that have none)."""
    points: tuple[Point, ...]

    @property
    def knee(self) -> Point:
        """The sparsest point that loses at most one percentage point of the best accuracy, on the validation set where
        there is one."""

        def accuracy(point: Point) -> float:
            return point.test if point.validation is None else point.validation

        best = max(map(accuracy, self.points))
        return max((each for each in self.points if accuracy(each) >= best - WITHIN), key=lambda each: each.sparsity)

    def to_dict(self) -> dict[str, Any]:
        points = [{**asdict(each), "gap": each.gap} for each in self.points]
        return {"order": self.order, "knee": self.knee.sparsity, "points": points}


def frontier(
    folder: Path,
    *,
    sparsities: Sequence[float] = SPARSITIES,
    against: Iterable[Path] = (),
    device: str | None = None,
    progress: Callable[[float, float], None] = lambda sparsity, share: None,
) -> Frontier:
    """Evaluate the network of a finished run at many sparsities. `against` are folders or results of other runs, whose
    networks were trained for their sparsity. Those of the same network, data, method and epochs are compared with, and
    this run itself."""
    if wrong := [each for each in sparsities if not 0 <= each < 1]:
        raise ValueError(f"expected sparsities from 0 to below 1, such as 0.9, got {wrong[0]:g}")
    check_folder(folder)
    results = [read_result_file(path) for path in (folder, *against)]
    trained = _trained(results)
    run = read_run(folder / RUN)
    if run.pattern is not None:
        raise ValueError(
            f"expected a run without a pattern, got pattern={run.pattern}, which cuts at other sparsities would break: "
            "train a run for each sparsity (gossamer sweep)"
        )
    context = join(device or run.device)
    chosen = modes.resolve(run, context)
    task = make_task(chosen, context)
    if task.metric != "accuracy":
        raise ValueError(f"expected a run that classifies images, got one on {run.data}")
    model = networks.to_layout(networks.create(run, task.num_classes), chosen, context.device)
    scores, order = scores_of(folder, model)
    first = (
        0.0 if (folder / MASK_VARIABLES).is_file() else round(results[0]["sparsity"], 4)
    )  # pruned weights cannot come back
    wanted = sorted({*(each for each in sparsities if each >= first), *(each for each in trained if each >= first)})
    whole = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    points = []
    for number, sparsity in enumerate(wanted):
        progress(sparsity, number / len(wanted))
        model.load_state_dict(whole)
        impose(model, masks_at(scores, sparsity))
        recalibrate(model, task)
        test, validation = (
            task.evaluate(model, part, _silent) if part == "test" or task.has_validation else None
            for part in ("test", "validation")
        )
        others = trained.get(sparsity, ())
        points.append(
            Point(sparsity, test or 0.0, validation, statistics.mean(others) if others else None, len(others))
        )
    return Frontier(order, tuple(points))


def masks_at(scores: Mapping[str, Tensor], sparsity: float) -> dict[str, Tensor]:
    """Masks that keep the highest scores of the whole network, exactly as many as the sparsity leaves."""
    flat = torch.cat([score.flatten() for score in scores.values()])
    kept = flat.numel() - int(sparsity * flat.numel() + 0.5)
    mask = torch.zeros_like(flat, dtype=torch.bool)
    mask[flat.topk(kept).indices] = True
    parts = torch.split(mask, [score.numel() for score in scores.values()])
    return {name: part.view(score.shape) for (name, score), part in zip(scores.items(), parts, strict=True)}


def recalibrate(model: nn.Module, task: Task) -> None:
    """Take fresh batch-norm statistics from training batches."""
    task.begin_epoch()
    task.source.state = type(task.source.state)()  # the same batches every time
    with torch.no_grad():
        update_bn((batch[0] for batch in islice(task.source, _CALIBRATION)), model)


def scores_of(folder: Path, model: nn.Module) -> tuple[dict[str, Tensor], str]:
    """Fill the model with the weights of a run; the scores by name of the weight, and what they are."""
    kept = (folder / MASK_VARIABLES).is_file()
    state, variables = mask_variables.read(folder) if kept else (load(folder / MODEL), {})
    source = folder / (MASK_VARIABLES if kept else MODEL)
    try:
        model.load_state_dict(state, strict=False)  # strict would miss the second names of tied weights
    except RuntimeError as error:  # of another shape
        raise ValueError(f"expected the tensors of this run in {source}, got others: {error}") from error
    weights = {weight.name: weight.parameter.detach() for weight in select(model)}
    if variables:
        shapes = [{name: each.shape for name, each in tensors.items()} for tensors in (variables, weights)]
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"expected a mask variable for each of {len(weights)} prunable tensors in {source}, got others: train "
                "the run again with --keep-mask-variables"
            )
        return {name: each.to(weights[name].device) for name, each in variables.items()}, "mask variables"
    return {name: weight.abs() for name, weight in weights.items()}, "magnitudes"


def _trained(results: Sequence[Mapping[str, Any]]) -> dict[float, list[float]]:
    """Test accuracies by sparsity of the runs that are like the first one."""
    first = results[0]
    like = [
        each
        for each in results
        if all(each.get(name) == first.get(name) for name in _ALIKE) and "accuracy" in each and not each.get("diverged")
    ]
    if len(results) > 1 and len(like) == 1:
        told = ", ".join(f"{name}={first.get(name)}" for name in _ALIKE)
        raise ValueError(f"expected runs to compare with that have {told}, got none among {len(results) - 1}")
    found: dict[float, list[float]] = {}
    for each in like:
        found.setdefault(_sparsity(each), []).append(each["accuracy"])
    return found


def _sparsity(result: Mapping[str, Any]) -> float:
    """What was asked for; of a run that asked for something else, what came of it."""
    asked = result.get("config", {}).get("sparsity")
    return float(asked) if is_number(asked) else round(result["sparsity"], 4)


def _silent(done: int, batches: int) -> None:
    pass


def write_frontier(found: Frontier, path: Path) -> None:
    path.write_text(json.dumps(found.to_dict(), indent=2, allow_nan=False) + "\n")


def frontier_table(found: Frontier) -> tuple[list[str], list[list[str]]]:
    """Head and rows. The gap has a sign: training for a sparsity should be better than cutting to it."""
    knee = found.knee
    rows = [
        [
            f"{each.sparsity:.1%}{' ← knee' if each is knee else ''}",
            f"{each.test:.2%}",
            "–" if each.validation is None else f"{each.validation:.2%}",
            "–" if each.trained is None else f"{each.trained:.2%} ({each.runs})",
            "–" if each.gap is None else f"{100 * each.gap:+.2f}".replace("-0.00", "+0.00"),
        ]
        for each in found.points
    ]
    return ["sparsity", "test", "validation", "trained for it (runs)", "gap, points"], rows


def read_frontier(path: Path) -> Frontier:
    """What `write_frontier` has written."""
    values = read_object(path, "the result of gossamer frontier", ": delete it")
    wrong = f"expected the result of gossamer frontier in {path}, got something else: delete it"
    try:
        points = [Point(**{each.name: point[each.name] for each in fields(Point)}) for point in values["points"]]
    except (KeyError, TypeError) as error:
        raise ValueError(wrong) from error
    optional = [(point.validation, point.trained) for point in points]
    if (
        not 0 < len(points) <= _MOST_POINTS
        or not isinstance(values.get("order"), str)
        or not all(map(_is_share, (each for point in points for each in (point.sparsity, point.test))))
        or not all(point.sparsity < 1 and is_count(point.runs) for point in points)
        or not all(each is None or _is_share(each) for pair in optional for each in pair)
    ):
        raise ValueError(wrong)
    return Frontier(values["order"], tuple(points))


def _is_share(value: object) -> bool:
    return is_number(value) and 0 <= value <= 1  # type: ignore[operator]
