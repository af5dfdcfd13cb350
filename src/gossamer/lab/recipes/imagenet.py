"""VGG-16, ResNet-50 and EfficientNet-B0 on ImageNet, from pretrained weights.

As in the paper: batch 128, learning rate 0.005, 90 epochs with training masks and 60 with frozen masks; here these are
fractions of the run. For the last two networks the paper prints only the loss of accuracy, so there is no number to
compare with directly.
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
        "imagenet-efficientnet-b0",
        "ImageNet, EfficientNet-B0, 55 % sparse",
        replace(_BASE, model="efficientnet_b0", sparsity=0.55),
    ),
)
