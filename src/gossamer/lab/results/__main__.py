"""Write README.md, docs/results.md and the plots of a checkout anew, from its run files."""

import argparse
from pathlib import Path

from gossamer.lab.results import density
from gossamer.lab.results.pages import documents, drawings
from gossamer.lab.results.plot import accuracy_against_sparsity, can_draw, map_fitting_curves
from gossamer.lab.results.records import read_objects

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m gossamer.lab.results", description=__doc__)
    parser.add_argument("checkout", type=Path, nargs="?", default=Path(), help="of gossamer; else where you are")
    checkout = parser.parse_args().checkout
    if not (checkout / "results").is_dir() or not (checkout / "README.md").is_file():
        parser.error(f"expected a checkout with README.md and results/, got {checkout.absolute()}")
    if can_draw():
        for path, records in drawings(checkout).items():
            accuracy_against_sparsity(records, path.stem.partition("-")[0], path)
        fits = checkout / "results" / "map-fitting"
        map_fitting_curves(read_objects(fits), fits / "curves.svg")
        if profiles := density.committed_profiles(checkout / "results"):
            density.draw(profiles, checkout / "results" / "density" / density.NAME)
    for path, content in documents(checkout).items():
        path.write_text(content)
