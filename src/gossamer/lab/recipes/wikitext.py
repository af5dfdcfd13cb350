"""The word language model on WikiText-2, trained as the Distiller example does, which the paper follows.

SGD without momentum at learning rate 20, halved whenever the validation perplexity does not fall; gradients clipped to
0.25; 20 columns, 35 steps of back-propagation, 40 epochs; the perplexity is that of the last epoch. The paper prints
neither λ1 nor phases for it, so its recipe has the paper's masks with λ1 solved for.
"""

from dataclasses import replace

from gossamer.lab.recipes.recipe import Published, Recipe, variants
from gossamer.lab.training.run import Run

_PUBLISHED = (
    Published("WikiText-2", perplexity=83.85, sparsity=0.0),
    Published("WikiText-2", perplexity=83.16, sparsity=0.813),
    Published("WikiText-2", perplexity=91.27, sparsity=0.947),
)
_BASE = Run(
    model="lstm_lm",
    data="wikitext2",
    epochs=40,
    batch_size=20,
    bptt=35,
    lr=20.0,
    momentum=0.0,
    weight_decay=1e-6,
    clip=0.25,
    schedule="plateau",
    lr_factor=0.5,
)
_PAPER = replace(_BASE, method="scl", preset="paper", sparsity=0.947)

RECIPES: tuple[Recipe, ...] = variants(
    _BASE,
    "wikitext2-lstm",
    "WikiText-2, two LSTM layers of 1500",
    sparsity=0.947,
    paper=_PAPER,
    published=_PUBLISHED,
    tolerance=1.0,
)
