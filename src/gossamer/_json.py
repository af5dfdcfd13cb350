"""JSON files that others may have written: what is not an object is refused by name."""

import json
from pathlib import Path
from typing import Any


def read_object(path: Path, expected: str = "a JSON object", remedy: str = "") -> dict[str, Any]:
    """The object in a file; an error says what was `expected` there, and how it is mended."""
    try:
        values = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"expected {expected} in {path}, got something else ({error}){remedy}") from error
    if not isinstance(values, dict):
        raise ValueError(f"expected {expected} in {path}, got {type(values).__name__}{remedy}")
    return values
