"""The fully connected DenseNet on MNIST: the paper's table of λ1 against sparsity.

The paper freezes masks in the first and the last 15 epochs and does not state how long they train in between; here it
is 25 epochs. It does not give the final learning rates either.
"""

from dataclasses import replace

from gossamer.lab.recipes.recipe import Published, Recipe, variants
from gossamer.lab.training.run import Run

DECAY_TABLE = "MNIST, table of λ1"
ESTIMATOR_SPARSITY = 0.95
# (estimator, normalised): the accuracy that the paper prints at this sparsity.
ESTIMATOR_TABLE = {
    ("leaky_relu", False): 0.9826,
    ("softplus", False): 0.9831,
    ("identity", False): 0.9837,
    ("leaky_relu", True): 0.9833,
    ("softplus", True): 0.9835,
    ("identity", True): 0.9839,
}
PUBLISHED = (
    Published(DECAY_TABLE, accuracy=0.9835, sparsity=0.0),
    Published(DECAY_TABLE, accuracy=0.9847, sparsity=0.340, decay=0.0),
    Published(DECAY_TABLE, accuracy=0.9824, sparsity=0.913, decay=0.01),
    Published(DECAY_TABLE, accuracy=0.9801, sparsity=0.962, decay=0.03),
    Published(DECAY_TABLE, accuracy=0.9464, sparsity=0.988, decay=0.08),
    Published(DECAY_TABLE, accuracy=0.7846, sparsity=0.998, decay=0.1),
    Published("MNIST, table of estimators", accuracy=0.9839, sparsity=0.95),
)
_BASE = Run(model="fc_densenet_mnist", data="mnist", epochs=55)
_PAPER = replace(
    _BASE,
    method="scl",
    preset="paper",
    decay=0.03,
    schedule="phases",
    settings={"warmup": "15ep", "sparsify": "25ep", "stabilise": "0ep"},
)

RECIPES: tuple[Recipe, ...] = variants(
    _BASE,
    "mnist-fc-densenet",
    "MNIST, fully connected DenseNet",
    sparsity=0.95,
    paper=_PAPER,
    published=PUBLISHED,
    tolerance=0.003,
)
