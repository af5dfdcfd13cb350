"""The tables of measured results in the README and the docs, generated from the committed run files.

python -m gossamer.results            # writes them into README.md and docs/results.md of a checkout
"""

from gossamer.results.costs import throughput
from gossamer.results.exhibits import map_fitting_rows, mnist, mnist_decay_table, mnist_estimator_table
from gossamer.results.pages import documents
from gossamer.results.races import about, race_blocks, race_page, race_table
from gossamer.results.records import Record
from gossamer.results.sweeps import sweep_table

__all__ = [
    "Record",
    "about",
    "documents",
    "map_fitting_rows",
    "mnist",
    "mnist_decay_table",
    "mnist_estimator_table",
    "race_blocks",
    "race_page",
    "race_table",
    "sweep_table",
    "throughput",
]
