"""Reading of JSON files from any source: errors name the file."""

import json
from pathlib import Path
from typing import Any

from gossamer.io.kinds import in_words, kind_of

MOST_BYTES = 64 << 20  # limit on a file; parsed, it may take twenty times as much memory


def read_object(path: Path, expected: str = "a JSON object", remedy: str = "") -> dict[str, Any]:
    """The object in a file. An error says what was `expected`, and the `remedy`."""
    if (size := path.stat().st_size) > MOST_BYTES:
        raise ValueError(f"expected {expected} of at most {MOST_BYTES} bytes in {path}, got {size} bytes{remedy}")
    try:
        text = path.read_text("utf-8")
        values = json.loads(text)
        if "\\ud" in text.lower():  # half a surrogate pair is not text: it could not be printed
            json.dumps(values, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        got = in_words(path) if kind_of(path) not in ("json", None) else f"something else ({error})"
        raise ValueError(f"expected {expected} in {path}, got {got}{remedy}") from error
    if not isinstance(values, dict):
        raise ValueError(f"expected {expected} in {path}, got {type(values).__name__}{remedy}")
    return values
