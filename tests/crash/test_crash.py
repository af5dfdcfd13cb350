"""Writers that are killed, refused, and lose their power; and careless ones, of which each mistake is found."""

import random
from pathlib import Path

import pytest

from crash.filesystem import Call, Fault, Killed, Recorder, after_power_loss
from crash.run import crash_at_every_call, lose_power_after_every_call
from crash.writers import PLANTED, WRITERS


@pytest.mark.parametrize("name", WRITERS)
def test_a_crash_at_any_call_leaves_a_whole_version(name: str) -> None:
    crashes, problems = crash_at_every_call(WRITERS[name])
    assert not problems
    assert crashes > 20


@pytest.mark.parametrize("name", WRITERS)
def test_a_loss_of_power_after_any_call_leaves_a_whole_version(name: str) -> None:
    states, problems = lose_power_after_every_call(WRITERS[name], states=8)
    assert not problems
    assert states >= 5  # a record is one write


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("without fsync", "HeaderTooSmall|expected|invalid|mixture"),
        ("without fsync folder", "found version 1, expected 2"),
        ("without rename", "expected|found version None"),
        ("without order", "found version None, expected 1 or 2"),
    ],
)
def test_a_planted_mistake_is_found(name: str, expected: str) -> None:
    problems = [*crash_at_every_call(PLANTED[name])[1], *lose_power_after_every_call(PLANTED[name], states=8)[1]]
    assert any(word in problem for problem in problems for word in expected.split("|"))


def test_what_a_disk_may_have_kept() -> None:
    calls = [
        Call("open", "new", file=1),
        Call("write", file=1, offset=0, content=b"ab"),
        Call("write", file=1, offset=2, content=b"cd"),
        Call("rename", "new", "old"),
    ]
    found = [*after_power_loss({"old": b"x"}, calls, random.Random(0), 200)]
    contents = {files.get("old") for files in found}
    assert {b"x", b"", b"ab", b"abcd", b"\0\0cd"} <= contents  # also the later write without the earlier one
    safe = [*calls[:3], Call("fsync", file=1), calls[3], Call("fsync folder")]
    assert [*after_power_loss({"old": b"x"}, safe, random.Random(0), 200)] == [{"old": b"abcd"}]


def test_a_killed_process_tidies_nothing_up(tmp_path: Path) -> None:
    with Recorder(tmp_path, Fault(2, "kill")), pytest.raises(Killed):
        WRITERS["saved model"].write(tmp_path, 1)
    (left,) = tmp_path.iterdir()
    assert left.name.endswith(".part")
