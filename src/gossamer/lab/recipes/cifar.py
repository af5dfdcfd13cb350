"""The networks on CIFAR-10 and CIFAR-100.

As in the paper: batch 64, learning rate 0.1, 150 epochs of warm-up, masks trained with a fixed λ1 until the target is
almost met (at most 40 epochs here) and for another 20 at a tenth of the rate, then 80 epochs at 0.01 and 80 at 0.001:
370 epochs. What the sparsify phase leaves of its 40 epochs goes to the last two stages. The paper does not give its
λ1: `gossamer reproduce` finds one by short runs for each sparsity, and the recipes have 0.01, which reaches 95 % zeros
on ResNet-20.

Ours: 240 epochs, one cosine to zero over all of them, weight decay 5e-4, as it was best for ResNet-20 in 60 epochs
(section 27 of docs/lab-book.md); other networks have not been tried with it. The phases are fractions of the
run, so they shrink with it; those of the paper are in epochs, as it gives them.
"""

from collections.abc import Sequence
from dataclasses import replace

from gossamer.lab.recipes.recipe import Published, Recipe, variants
from gossamer.lab.training.run import Run

_OURS = Run(epochs=240, weight_decay=5e-4)
_PAPER = Run(
    epochs=370,
    method="scl",
    decay=0.01,
    leave_at=0.94,
    preset="paper",
    schedule="phases",
    settings={"warmup": "150ep", "sparsify": "40ep", "stabilise": "20ep"},
)
# (estimator, normalised): the accuracy that the paper prints, at 95 % zeros.
ESTIMATORS = {
    ("cifar10", "resnet20"): {
        ("leaky_relu", False): 0.8801,
        ("softplus", False): 0.8795,
        ("identity", False): 0.8810,
        ("leaky_relu", True): 0.8948,
        ("softplus", True): 0.9013,
        ("identity", True): 0.9008,
    },
    ("cifar10", "resnet110"): {
        ("leaky_relu", False): 0.9315,
        ("softplus", False): 0.9226,
        ("identity", False): 0.9276,
        ("leaky_relu", True): 0.9325,
        ("softplus", True): 0.9344,
        ("identity", True): 0.9358,
    },
}


def _recipes(
    model: str,
    title: str,
    table: str,
    accuracies: Sequence[tuple[float, float] | tuple[float, float, float]],
    *,
    sparsity: float,
    data: str = "cifar10",
) -> tuple[Recipe, ...]:
    """`accuracies` are a sparsity, the accuracy that the paper prints for it, and the reduction of FLOPs if it does."""
    return variants(
        replace(_OURS, model=model, data=data),
        f"{data}-{model.removesuffix('_cifar').replace('_', '-')}",
        f"{'CIFAR-100' if data == 'cifar100' else 'CIFAR-10'}, {title}",
        sparsity=sparsity,
        paper=replace(_PAPER, model=model, data=data, leave_at=round(sparsity - 0.01, 3)),
        published=tuple(
            Published(table, accuracy=accuracy, sparsity=share, flops_reduction=flops[0] if flops else None)
            for share, accuracy, *flops in accuracies
        ),
        tolerance=0.004,
    )


RECIPES: tuple[Recipe, ...] = (
    *_recipes(
        "resnet20",
        "ResNet-20",
        "ResNet-20 on CIFAR-10; 95 %: table of estimators",
        ((0.0, 0.9125), (0.5, 0.9261, 0.49), (0.7, 0.9235, 0.69), (0.95, 0.9008)),
        sparsity=0.95,
    ),
    *_recipes(
        "resnet110",
        "ResNet-110",
        "ResNet-110 on CIFAR-10; 95 %: table of estimators",
        ((0.0, 0.9357), (0.7, 0.9482, 0.73), (0.9, 0.9456, 0.90), (0.95, 0.9358)),
        sparsity=0.9,
    ),
    *_recipes("vgg16_cifar", "VGG-16", "VGG-16 on CIFAR-10, table of estimators", ((0.97, 0.9439),), sparsity=0.97),
    *_recipes("vgg19_cifar", "VGG-19", "figure of VGG-19, which prints no numbers", (), sparsity=0.97),
    *_recipes(
        "densenet40",
        "DenseNet-40",
        "DenseNet-40 on CIFAR-10",
        ((0.0, 0.9476), (0.4, 0.9481, 0.38), (0.71, 0.9466, 0.70), (0.9, 0.9453, 0.88)),
        sparsity=0.9,
    ),
    *_recipes("densenet_bc100", "DenseNet-BC-100", "text of section V-D", ((0.8, 0.9540),), sparsity=0.8),
    *_recipes(
        "wrn28_10",
        "WRN-28-10",
        "comparison with L0 regularisation",
        ((0.0, 0.9600), (0.2, 0.9636), (0.51, 0.9653), (0.91, 0.9633)),
        sparsity=0.91,
    ),
    *_recipes(
        "wrn28_10",
        "WRN-28-10",
        "comparison with L0 regularisation",
        ((0.0, 0.8075), (0.2, 0.8179), (0.5, 0.8187), (0.9, 0.8151)),
        sparsity=0.9,
        data="cifar100",
    ),
)
