"""VGG-16, ResNet-50 and EfficientNet-B0 on ImageNet, from pretrained weights.

As in the paper: batch 128, learning rate 0.005, 90 epochs with training masks and 60 with frozen masks; here these are
fractions of the run. For the last two networks the paper prints only the loss of accuracy, so there is no number to
compare with directly. It prunes EfficientNet-B0 with the rule of Zhu & Gupta as well, by three policies that set the
sparsity of each kind of layer.
"""

from dataclasses import replace

from gossamer.lab.recipes.recipe import Published, Recipe, share
from gossamer.lab.training.run import Run

_BASE = Run(
    data="imagefolder",
    model_options={"pretrained": True},
    epochs=150,
    batch_size=128,
    lr=0.005,
    method="scl",
    sparsity=0.74,
    schedule="phases_cosine",
    settings={"warmup": "0run", "sparsify": share(70, of=150), "stabilise": share(20, of=150)},
)

# Sparsity of convolutions, depthwise convolutions and the classifier, and of the network with these.
_POLICIES = ((0.2, 0.1, 0.2, 0.196524), (0.5, 0.5, 0.5, 0.5), (0.5, 0.125, 0.6, 0.51141))
_EFFICIENTNET = "imagenet-efficientnet-b0"

RECIPES = (
    Recipe(
        "imagenet-vgg16",
        "ImageNet, VGG-16, 73.3 % sparse",
        replace(_BASE, model="vgg16", sparsity=0.733),
        (
            Published("VGG-16 on ImageNet", accuracy=0.7284, sparsity=0.565, flops_reduction=0.50),
            Published("VGG-16 on ImageNet", accuracy=0.7205, sparsity=0.733, flops_reduction=0.71),
            Published("VGG-16 on ImageNet", accuracy=0.6924, sparsity=0.899, flops_reduction=0.87),
        ),
    ),
    Recipe("imagenet-resnet50", "ImageNet, ResNet-50, 74 % sparse", replace(_BASE, model="resnet50")),
    Recipe(
        _EFFICIENTNET,
        "ImageNet, EfficientNet-B0, 55 % sparse",
        replace(_BASE, model="efficientnet_b0", sparsity=0.55),
    ),
    *(
        Recipe(
            f"{_EFFICIENTNET}-zhu-{number}",
            f"ImageNet, EfficientNet-B0, gradual magnitude: {100 * plain:g} % of convolutions, {100 * depthwise:g} % "
            f"of depthwise ones, {100 * linear:g} % of the classifier",
            replace(
                _BASE,
                model="efficientnet_b0",
                method="gradual_per_layer",
                sparsity=sparsity,
                settings={**_BASE.settings, "depthwise": depthwise, "linear": linear},
            ),
        )
        for number, (plain, depthwise, linear, sparsity) in enumerate(_POLICIES, 1)
    ),
)
