"""JSON files that others may have written: what is not an object is refused by name."""

import json
from pathlib import Path
from typing import Any


def read_object(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"expected JSON in {path}, got something else ({error})") from error
    if not isinstance(values, dict):
        raise ValueError(f"expected a JSON object in {path}, got {type(values).__name__}")
    return values
