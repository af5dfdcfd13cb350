"""The tables of measured results in the README and the docs, generated from the committed run files.

python -m gossamer.lab.results            # writes them into README.md and docs/results.md of a checkout
"""

from gossamer.lab.results.comparisons import about, blocks_of, comparison_page, table_of
from gossamer.lab.results.costs import throughput
from gossamer.lab.results.exhibits import map_fitting_rows, mnist, mnist_decay_table, mnist_estimator_table
from gossamer.lab.results.general import problem_table
from gossamer.lab.results.pages import documents
from gossamer.lab.results.records import Record
from gossamer.lab.results.sweeps import sweep_table

__all__ = [
    "Record",
    "about",
    "blocks_of",
    "comparison_page",
    "documents",
    "map_fitting_rows",
    "mnist",
    "mnist_decay_table",
    "mnist_estimator_table",
    "problem_table",
    "sweep_table",
    "table_of",
    "throughput",
]
