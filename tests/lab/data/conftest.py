"""No test of this folder touches the network or the user's own data."""

from __future__ import annotations

from pathlib import Path

import pytest

from gossamer.lab.data import locate

SHARED = Path(locate.__file__).resolve().parents[4].parent / "shared" / "data"


@pytest.fixture(autouse=True)
def empty_surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty cache, no GOSSAMER_DATA, and a checkout without a shared folder."""
    monkeypatch.delenv("GOSSAMER_DATA", raising=False)
    monkeypatch.setattr(locate, "cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setattr(locate, "__file__", str(tmp_path / "a" / "b" / "c" / "d" / "e" / "locate.py"))


@pytest.fixture
def shared_data() -> Path:
    """The folder with the real data sets beside the checkout."""
    if not SHARED.is_dir():
        pytest.skip("the real data sets are not beside this checkout")
    return SHARED
