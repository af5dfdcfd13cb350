"""The quick start: scikit-learn's digits, which need no download, in less than a minute on one core."""

from dataclasses import replace

from gossamer.lab.recipes.recipe import Recipe
from gossamer.lab.training.run import Run

_DENSE = Run(model="digits_cnn", data="digits", validation=200, epochs=60, weight_decay=5e-4, log_steps=10)

RECIPES = (
    Recipe("digits-dense", "digits, small CNN, dense", _DENSE),
    Recipe("digits", "digits, small CNN, 95 % sparse", replace(_DENSE, method="scl", sparsity=0.95)),
)
