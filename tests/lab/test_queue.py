"""The queue of runs that wait for a GPU."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from gossamer.lab.batched.__main__ import comparison_of, parse, runs_of_sweep
from gossamer.lab.batched.supported import check
from gossamer.lab.recipes import find
from gossamer.lab.reproduce import paper_settings

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.delitem(sys.modules, "gpu_queue", raising=False)
    return importlib.import_module("gpu_queue")


def write(path: Path, *runs: tuple[str, str, float]) -> Path:
    tables = [
        f"[[run]]\nname = \"{name}\"\nwhy = \"a test\"\ncommand = '''{command}'''\nminutes = {minutes}\n"
        for name, command, minutes in runs
    ]
    path.write_text("\n".join(tables))
    return path


def test_the_committed_queue_is_whole(queue: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    runs = queue.read()
    assert len({run["name"] for run in runs}) == len(runs)
    queue.main(["--list"])
    assert len(capsys.readouterr().out.splitlines()) == len(runs)


def test_the_list_ends_quietly_when_its_reader_does() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, str(BENCHMARKS / "gpu_queue.py"), "--list"]
    ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_queued_sweeps_and_comparisons_are_of_runs_that_can_be_trained(queue: ModuleType) -> None:
    checked = []
    for run in queue.read():
        program, *arguments = run["command"].removeprefix("python -m ").format(out="out").split()
        if program == "gossamer.lab.reproduce":
            assert arguments[0] in paper_settings.RECIPES
        elif program == "gossamer.lab.batched":
            chosen = parse(arguments)
            if arguments[0] == "train":
                runs = [find(chosen.recipe).run.with_settings(chosen.set)]
            elif arguments[0] == "sweep":
                check(runs := runs_of_sweep(chosen))
            else:
                check(runs := comparison_of(chosen).runs())
            assert runs
        else:
            continue
        checked.append(run["name"])
    assert "paper-resnet20" in checked
    assert len(checked) > 15


def test_runs_go_in_order_as_far_as_the_time_goes_and_are_not_repeated(
    queue: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    python = sys.executable
    file = write(
        tmp_path / "gpu_queue.toml",
        ("first", f"{python} -c \"open(r'{{out}}/first.txt', 'a').write('once')\"", 0.5),
        ("failing", f'{python} -c "print(1 / 0)"', 0.5),
        ("missing", "no-such-program", 0.5),
        ("long", f"{python} --version", 50),
    )
    asked = ["--queue", str(file), "--out", str(tmp_path / "out"), "--minutes", "5"]
    with pytest.raises(SystemExit) as left:
        queue.main(asked)
    assert left.value.code == 1
    assert "long: needs 50 minutes" in capsys.readouterr().out
    ended = json.loads((tmp_path / "out" / "queue.json").read_text())
    assert {name: each["status"] for name, each in ended.items()} == {"first": 0, "failing": 1, "missing": 1}
    assert "ZeroDivisionError" in (tmp_path / "out" / "failing.log").read_text()
    with pytest.raises(SystemExit):
        queue.main(asked)
    assert "first: done before" in capsys.readouterr().out
    assert (tmp_path / "out" / "first.txt").read_text() == "once"


def test_a_run_that_resumes_is_stopped_in_time_and_goes_on(queue: ModuleType, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import pathlib, signal, sys, time\n"
        "before = pathlib.Path(sys.argv[1])\n"
        "sys.exit(0) if before.exists() else None\n"
        "signal.signal(signal.SIGTERM, lambda *_: (before.touch(), sys.exit(130)))\n"
        "print('waits', flush=True)\n"
        "time.sleep(60)\n"
    )
    (tmp_path / "out").mkdir()
    command = f"{sys.executable} {program} {{out}}/checkpoint"
    run = {"name": "long", "why": "a test", "command": command, "minutes": 30, "resumes": True}
    queue.STOPPING = 2.0
    assert queue.work([run], tmp_path / "out", 5 / 60)["long"]["status"] == queue.INTERRUPTED
    assert queue.work([run], tmp_path / "out", 5 / 60)["long"]["status"] == 0


def test_wrong_calls(queue: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "gpu_queue.toml", ("a", "true", 1))
    with pytest.raises(SystemExit):
        queue.main(["--queue", str(file), "--only", "b", "--out", str(tmp_path)])
    assert "unknown runs b: the queue has a" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        queue.main(["--queue", str(file)])
    assert "expected --out DIR" in capsys.readouterr().err
    file.write_text('[[run]]\nname = "a"\n')
    with pytest.raises(ValueError, match=r"expected command, minutes, why of every run in gpu_queue\.toml"):
        queue.read(file)
