"""Records of exhibits: what is under a name is complete."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gossamer.lab.training.checkpoint import write_atomically


def write_record(path: Path, content: Mapping[str, Any]) -> None:
    """On one line: a curve, or the counts of 784 pixels, would be as many lines."""
    text = json.dumps(content, allow_nan=False) + "\n"
    write_atomically(path, lambda file: file.write(text.encode()))
