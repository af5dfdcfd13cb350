import sys
from pathlib import Path

from gossamer.results.pages import documents, drawings
from gossamer.results.plot import accuracy_against_sparsity, can_draw, map_fitting_curves
from gossamer.results.records import read

if __name__ == "__main__":
    checkout = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    if can_draw():
        for path, records in drawings(checkout).items():
            accuracy_against_sparsity(records, path)
        fits = checkout / "results" / "map-fitting"
        map_fitting_curves(read(fits), fits / "curves.svg")
    for path, content in documents(checkout).items():
        path.write_text(content)
