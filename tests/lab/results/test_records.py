"""Reading result files: a damaged one is named, whatever is wrong with it."""

from pathlib import Path

import pytest

from gossamer.lab.results.records import read_objects


def test_records_come_in_the_order_of_their_names(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / f"{name}.json").write_text(f'{{"name": "{name}"}}')
    (tmp_path / "table.md").write_text("not a record")
    assert read_objects(tmp_path) == [{"name": "a"}, {"name": "b"}]
    assert read_objects(tmp_path / "nowhere") == []


@pytest.mark.parametrize("content", [b"", b'{"accuracy": 9', b"\xff\xfe", b"[" * 100_000, b"[1]", b"3"])
def test_a_damaged_record_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "torn.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"expected a JSON object in .*torn\.json, got .*: delete it"):
        read_objects(tmp_path)
