"""The files of a finished run: result.json, with everything needed to check and repeat it, and the network."""

import json
import math
import platform
import shlex
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from gossamer.diagnostics import Health
from gossamer.io.container import is_count
from gossamer.io.kinds import in_words
from gossamer.io.sparse_file import save
from gossamer.lab import model_files
from gossamer.lab.checkpoint import Checkpoints, write_atomically
from gossamer.lab.json_files import read_object
from gossamer.lab.training.distributed import DistributedContext
from gossamer.lab.training.run import Run
from gossamer.provenance import commit, cpu_name, versions
from gossamer.report import Report, Row, report

RESULT = "result.json"
MODEL = model_files.MODEL
SPARSE_MODEL = "model.sparse.safetensors"
RUN = model_files.RUN
LAYERS = "layers.json"
HEALTH = "health.json"


def make_result(
    run: Run,
    context: DistributedContext,
    *,
    mode: str,
    counted: Report,
    metric: str,
    test: float,
    validation: float | None,
    seconds: float,
    settled: Mapping[str, float] | None = None,
    teacher: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The result as plain values.

    `mode` describes how steps were computed. `flops` are per sample (for a language model: per word). `options` has all
    settings of the method, `settled` the derived ones, and `teacher` describes the teacher, if any.
    """
    total = counted.total
    result: dict[str, Any] = {
        "run_id": run.run_id,
        "complete": True,
        metric: test,
        f"validation_{metric}": validation,
        "sparsity": counted.sparsity,
        "nonzeros": total.nonzeros,
        "weights": total.weights,
        "flops": total.flops_sparse,
        "flops_dense": total.flops_dense,
        "seed": run.seed,
        "epochs": run.epochs,
        "method": run.method,
        "model": run.model,
        "data": run.data,
        "seconds": seconds,
        "mode": mode,
        "config": run.to_dict(),
        "options": {} if run.method == "dense" else asdict(run.options),
        "versions": versions(),
        "commit": commit(),
        "hardware": hardware(context),
    }
    further = {"settled": settled, "teacher": teacher}
    return {**result, **{name: dict(values) for name, values in further.items() if values is not None}}


def count(run: Run, model: nn.Module, example: Tensor) -> Report:
    return report(model, example, include=run.include or None, exclude=run.exclude or None)


@contextmanager
def writing(folder: Path, content: str = "the run") -> Iterator[None]:
    """A context for the first write to the folder of a run, or of other `content`, that explains why it fails."""
    files = [each for each in (folder, *folder.parents) if each.exists() and not each.is_dir()]
    if files:
        which = "which" if files[0] == folder else f"and {files[0]}"
        raise ValueError(
            f"expected a folder for {content}, got {folder}, {which} is a file: choose another name (--out)"
        )
    try:
        yield
    except OSError as error:
        raise OSError(
            f"expected a folder for {content} that can be written, got {folder} ({error}): choose another one, make "
            "room on its disk, or change its permissions"
        ) from error


def read_result(folder: Path, run: Run) -> dict[str, Any] | None:
    """The result of this run if the folder has it. A folder of another run is an error."""
    if (folder / RUN).is_file():
        read_object(folder / RUN, remedy=": if it is damaged, delete it; a checkpoint has the run, too")
        _refuse_another(folder, run, folder / RUN)
    result = folder / RESULT
    found = read_object(result, remedy=": if it is damaged, delete it to train again") if result.is_file() else {}
    found = with_current_keys(found)
    if found.get("complete") is not True:
        _refuse_files_of_others(folder)
        return None
    _refuse_another(folder, run, result)
    missing = [name for name in (MODEL, SPARSE_MODEL, LAYERS) if not (folder / name).is_file()]
    if missing:
        warnings.warn(
            f"this run has finished, but {', '.join(missing)} is no longer in {folder}: put it back, or delete "
            f"{result} to train again",
            stacklevel=2,
        )
    return found


def _refuse_files_of_others(folder: Path) -> None:
    """Raise an error if the run would overwrite files that no run of this folder has written."""
    if (folder / RUN).is_file() or Checkpoints(folder).paths():
        return
    names = [name for name in (MODEL, SPARSE_MODEL, LAYERS, HEALTH, RESULT) if (folder / name).exists()]
    if names:
        raise ValueError(
            f"expected an empty folder or that of this run, got {folder}, which has {', '.join(names)} but no {RUN}: "
            "training would overwrite them; choose another folder, or move these files"
        )


def _refuse_another(folder: Path, run: Run, path: Path) -> None:
    """Raise an error if a file of the folder belongs to another run."""
    other = read_run(path)
    if other.run_id != run.run_id:
        command = shlex.join(["gossamer", "train", str(path), "--out", str(folder)])
        raise ValueError(
            f"{folder} belongs to run {other.run_id}, which differs from run {run.run_id} in "
            f"{', '.join(run.differences_from(other))}: choose another folder, or delete this one; "
            f"{command} resumes the run that it belongs to"
        )


def read_run(path: Path) -> Run:
    """The run in a file of its keys, such as run.json, or in a result.json, which has them as `config`."""
    values = read_object(path)
    config = values.get("config")
    try:
        return Run.from_dict(config if isinstance(config, dict) else values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def check_folder(path: Path) -> None:
    """Refuse a path that is not the folder of a run, and say what it is."""
    if path.is_dir():
        return
    what = f"is {in_words(path)}" if in_words(path) else "is something else" if path.exists() else "does not exist"
    raise ValueError(
        f"expected the folder of a finished run, got {path}, which {what}: name the folder that gossamer train has "
        "written"
    )


def read_result_file(path: Path) -> dict[str, Any]:
    """The result in a file, or in the folder of a run."""
    file = path / RESULT if path.is_dir() else path
    if not path.exists():
        raise FileNotFoundError(f"expected the folder of a finished run, got {path}, which does not exist")
    if not file.is_file():
        raise FileNotFoundError(f"expected a finished run with a {RESULT} in it, got {path}: train it to the end first")
    values = with_current_keys(read_object(file))
    if not {"sparsity", "nonzeros", "weights", "seconds"} <= values.keys():
        raise ValueError(
            f"expected the result of a run in {file}, got something else: name folders of gossamer train, sweep or "
            "compare"
        )
    check_result(values, file)
    return values


_KEYS = {
    "connections": "nonzeros",
    "connections_by_tensor": "nonzeros_by_tensor",
    "seconds_of_all_runs_together": "seconds_of_batch",
    "runs_together": "runs_in_batch",
}
"""Keys of results with a new name, by the old one, which older files have."""


def with_current_keys(result: Mapping[str, Any]) -> dict[str, Any]:
    return {_KEYS.get(name, name): value for name, value in result.items()}


_NUMBERS = ("accuracy", "perplexity", "sparsity", "nonzeros", "weights", "seconds", "train_loss")
_OPTIONAL = ("flops", "flops_dense", "validation_accuracy", "validation_perplexity")
_SHARES = ("accuracy", "validation_accuracy", "sparsity")


def check_result(values: Mapping[str, Any], file: Path) -> None:
    """Refuse a result whose table entries are not numbers."""
    diverged = values.get("diverged") is True
    wrong = [
        name
        for name in (*_NUMBERS, *_OPTIONAL)
        if name in values
        and not is_number(values[name])
        and not (values[name] is None and (name in _OPTIONAL or (name == "train_loss" and diverged)))
    ]
    wrong += [name for name in _SHARES if is_number(values.get(name)) and not 0 <= values[name] <= 1]
    if not diverged and "accuracy" not in values and "perplexity" not in values:
        wrong.append("accuracy")
    if "config" in values and not isinstance(values["config"], dict):
        wrong.append("config")
    if wrong:
        found = ", ".join(f"{name} = {values.get(name)!r:.40}" for name in wrong)
        raise ValueError(
            f"expected the result of a run with a number for each of {', '.join(wrong)} in {file}, and shares from 0 "
            f"to 1, got {found}: delete it to train again"
        )


def is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond all floats
        return False


def read_layers(path: Path) -> Report:
    """The nonzeros of every layer of a finished run, from its folder or its result file."""
    file = (path if path.is_dir() else path.parent) / LAYERS
    if not file.is_file():
        raise FileNotFoundError(
            f"expected the layers of a finished run in {file}, which does not exist; gossamer train writes them, a "
            "sweep does not"
        )
    names = {each.name for each in fields(Row)}
    try:
        found = Report(
            tuple(
                Row(**{key: value for key, value in row.items() if key in names} | {"shape": tuple(row["shape"])})
                for row in map(with_current_keys, read_object(file)["rows"])
            )
        )
        for row in found.rows:
            _check_row(row)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"expected the layers of a finished run in {file}, got something else ({error!r}): train it again"
        ) from error
    return found


def _check_row(row: Row) -> None:
    whole = (*row.shape, row.weights, row.nonzeros, row.features, row.dead_features)
    optional = (row.flops_dense, row.flops_sparse)
    if not all(isinstance(each, str) for each in (row.name, row.type, row.pattern)):
        raise TypeError(f"{row.name!r:.40} has a name, type or pattern that is no text")
    if not all(map(is_count, whole)) or not all(each is None or is_count(each) for each in optional):
        raise TypeError(f"{row.name!r:.40} has counts that are not numbers")
    if row.nonzeros > row.weights or row.dead_features > row.features:
        raise TypeError(f"{row.name!r:.40} has more nonzeros or dead features than it has weights or features")


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """One line per key, as there may be hundreds of numbers under one."""
    lines = (f"  {json.dumps(key)}: {json.dumps(value, allow_nan=False)}" for key, value in values.items())
    text = "{\n" + ",\n".join(lines) + "\n}\n"
    write_atomically(path, lambda file: file.write(text.encode()))


def write_all(
    folder: Path,
    tensors: Mapping[str, Tensor],
    counted: Report,
    result: Mapping[str, Any],
    health: Health | None = None,
) -> None:
    """Write all files of a finished run. The result is written last: the run is complete when it exists. `health` has
    the diagnostics of the masks, if there are any.

    The folder may have been deleted in the meantime: it is created again, with the run.json that was written first.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / RUN, result["config"])
        write_model(folder / MODEL, tensors)
        write_json(folder / LAYERS, counted.to_dict())
        if health is not None:
            write_json(folder / HEALTH, _without_infinities(asdict(health)))
        write_json(folder / RESULT, result)
    except OSError as error:
        raise OSError(
            f"the last step is done, but the result cannot be written to {folder} ({error}): free some space on the "
            f"disk and run the same command again; {Checkpoints(folder).next_time()}"
        ) from error


def _without_infinities(values: dict[str, Any]) -> dict[str, Any]:
    """The values with None for infinite ones and NaN, which JSON does not have: a run that has finished is kept."""
    found: dict[str, Any] = json.loads(json.dumps(values), parse_constant=lambda name: None)
    return found


def write_model(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write the network as plain safetensors and as a sparse file for `gossamer.load`. Tied weights are written once,
    under their first name."""
    seen: dict[tuple[object, ...], str] = {}
    plain: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        context = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg())
        if tensor.numel() and seen.setdefault(context, name) != name:
            continue
        plain[name] = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    write_atomically(path, lambda file: file.write(safetensors.torch.save(plain)))
    save(plain, path.with_name(SPARSE_MODEL))


def hardware(context: DistributedContext) -> dict[str, Any]:
    found: dict[str, Any] = {
        "device": context.device.type,
        "processes": context.world,
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "system": platform.system(),
    }
    if context.device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(context.device)
    return found
