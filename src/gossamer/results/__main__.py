import sys
from pathlib import Path

from gossamer.results.pages import documents, drawings
from gossamer.results.plot import accuracy_against_sparsity, can_draw

if __name__ == "__main__":
    checkout = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    for path, records in drawings(checkout).items() if can_draw() else ():
        accuracy_against_sparsity(records, path)
    for path, content in documents(checkout).items():
        path.write_text(content)
