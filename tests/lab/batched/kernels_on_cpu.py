"""The GPU kernels of stacked networks against torch, on a CPU by Triton's interpreter.

A program of its own, because the interpreter has to be switched on before Triton is imported.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gossamer import budget
from gossamer.budget_triton import meet_budgets_on_gpu_
from gossamer.lab.batched import layers
from gossamer.lab.batched.conv_triton import Convolution
from gossamer.lab.batched.norm_triton import NormAddReLU
from gossamer.lab.batched.pool_triton import PoolAndPad
from gossamer.lab.batched.stack import NetworkStack
from gossamer.lab.models.densenet import DenseNet
from gossamer.lab.models.resnet import ResNet
from gossamer.lab.models.wide_resnet import WideResNet
from gossamer.methods import scl
from gossamer.methods.base import Context, Layout, MatrixStep, Request, Timeline
from gossamer.methods.scl import SCL, SCLOptions
from gossamer.schedule import Plan
from gossamer.target import make_target


def leaf(*shape: int) -> Tensor:
    return torch.randn(shape).requires_grad_()


def twin(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_()


def check(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def check_gradients(y: Tensor, ours: list[Tensor], expected: Tensor, theirs: list[Tensor]) -> None:
    gradient = torch.randn_like(expected)
    check([*torch.autograd.grad(y, ours, gradient)], [*torch.autograd.grad(expected, theirs, gradient)])


def convolution(runs: int, batch: int, height: int, width: int, channels: int, outputs: int, stride: int) -> None:
    x, w = leaf(runs, batch, height, width, channels), leaf(runs, outputs, 3, 3, channels)
    x2, w2 = twin(x), twin(w)
    y, sums = Convolution.apply(x, w, stride)
    reference = [
        F.conv2d(images.permute(0, 3, 1, 2), filters.permute(0, 3, 1, 2), stride=stride, padding=1).permute(0, 2, 3, 1)
        for images, filters in zip(x2, w2, strict=True)
    ]
    expected = torch.stack(reference)
    expected_sums = torch.stack([expected.sum((1, 2, 3)), expected.square().sum((1, 2, 3))], 1)
    check([y, sums], [expected, expected_sums])
    check_gradients(y, [x, w], expected, [x2, w2])


def norm(runs: int, pixels: int, channels: int, *, with_shortcut: bool, sums_known: bool) -> None:
    shape = (runs, 2, pixels, pixels, channels)
    ours = [leaf(*shape), leaf(*shape), leaf(runs, channels), leaf(runs, channels)]
    theirs = [twin(tensor) for tensor in ours]
    statistics = torch.zeros(runs, channels), torch.ones(runs, channels)
    copies = [each.clone() for each in statistics]
    x, shortcut, gamma, beta = ours
    sums = torch.stack([x.sum((1, 2, 3)), x.square().sum((1, 2, 3))], 1).detach() if sums_known else None
    y = NormAddReLU.apply(x, sums, shortcut if with_shortcut else None, gamma, beta, *statistics, 0.1, 1e-5)
    rows = []
    for row in range(runs):
        x2, shortcut2, gamma2, beta2 = (tensor[row] for tensor in theirs)
        normal = F.batch_norm(x2.permute(0, 3, 1, 2), copies[0][row], copies[1][row], gamma2, beta2, True, 0.1, 1e-5)
        normal = normal.permute(0, 2, 3, 1)
        rows.append(F.relu(normal + shortcut2 if with_shortcut else normal))
    expected = torch.stack(rows)
    check([y, *statistics], [expected, *copies])
    used = [0, 1, 2, 3] if with_shortcut else [0, 2, 3]
    check_gradients(y, [ours[index] for index in used], expected, [theirs[index] for index in used])


def pool(runs: int, pixels: int, channels: int, new_channels: int) -> None:
    x = leaf(runs, 2, pixels, pixels, channels)
    x2 = twin(x)
    y = PoolAndPad.apply(x, new_channels)
    expected = F.avg_pool2d(x2.flatten(0, 1).permute(0, 3, 1, 2), 2).permute(0, 2, 3, 1)
    expected = F.pad(expected, (0, new_channels)).unflatten(0, (runs, 2))
    check([y], [expected])
    check_gradients(y, [x], expected, [x2])


def small_network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 20, 3, padding=1, bias=False), nn.BatchNorm2d(20), nn.ReLU(), nn.Conv2d(20, 4, 1, bias=False),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3),
    )  # fmt: skip


def biased_network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 20, 3, padding=1, bias=False), nn.BatchNorm2d(20),
        nn.ReLU(), nn.Conv2d(20, 4, 1), nn.Flatten(), nn.Linear(256, 3),
    )  # fmt: skip


def stack(make: type[nn.Module] | object, kernels: bool, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    layers._on_gpu = lambda images: kernels  # type: ignore[assignment]
    torch.manual_seed(0)
    networks = [make() for _ in range(2)]  # type: ignore[operator]
    stacked = NetworkStack(networks, device=torch.device("cpu"), dtype=dtype)
    stacked.template.train()
    images = torch.randn(2, 2, 3, 8, 8).to(dtype)
    output = stacked(images).float()
    gradients = stacked.gradients(output.square().sum())
    stacked.template.eval()
    with torch.no_grad():
        evaluated = stacked.on_same_images(images[0])
    return [output.detach(), gradients, evaluated, *(each.float() for each in stacked.buffers.values())]


def budgets() -> None:
    """With ties, with what is gone for good, with everything or nothing kept, with many values of the same digits, some
    of them of one block only."""
    values = torch.randn(8, 9000)
    values[1, 2000:] = values[2, 3000:] = -torch.inf
    values[3] = values[4] = 0.25
    values[5] = 1.0 + 1e-6 * torch.rand(9000)
    values[6, :500] = 0.01 + 1e-8 * torch.rand(500)
    values[7] = (values[7] * 3).round() / 2
    keep = torch.tensor([100, 2000, 3010, 9000, 4321, 4500, 4600, 0])
    keep[6] = int((values[6] > 0.01).sum()) - 200
    fused, plain = values.clone(), values.clone()
    masks = [torch.rand(8, 9000) > 0.5]
    masks.append(masks[0].clone())
    before = masks[0].clone()
    thresholds, flips = meet_budgets_on_gpu_(fused, masks[0], keep)
    met = budget.meet_budgets_(plain, masks[1], keep)
    assert torch.equal(thresholds, met.threshold)
    assert torch.equal(*masks)
    assert torch.equal(fused, plain)
    assert flips.tolist() == met.flips.tolist() == (before != masks[0]).sum(1).tolist()
    # With connections that are kept whatever happens, some of them named twice.
    protected = torch.randint(9000, (8, 300))
    protected[:, 1] = protected[:, 0]
    fused, plain, keep = values.clone(), values.clone(), keep.clamp_min(300)
    thresholds, _ = budget._meet_with_kernels_(fused, masks[0], keep, protected)
    assert torch.equal(thresholds, budget.meet_budgets_(plain, masks[1], keep, protected).threshold)
    assert torch.equal(*masks)
    assert torch.equal(fused, plain)
    assert masks[0].gather(1, protected).all()


def learned_masks(runs: Sequence[SCLOptions], *, decay: float | None = None, same_bits: bool = False) -> None:
    """Steps of many runs in fused kernels and in torch operations, from parts of larger matrices as a stack has them.

    The first run has a gradient that is not finite in one of the steps. Where nothing is scaled by a sum of squares,
    which kernels add up in another order, mask variables have the same bits.
    """
    layout, others, steps, cpu = Layout(("a", "b"), ((7, 700), (40, 5))), 16, 4, torch.device("cpu")
    targets = [None if decay is None else make_target(layout.sizes, decay=decay, floors=(0, 0))] * len(runs)
    requests = [
        Request(0.3 + 0.6 * row / len(runs), row, options, target)
        for row, (options, target) in enumerate(zip(runs, targets, strict=True))
    ]
    variables = torch.randn(len(runs), layout.count + others)
    gradients = torch.randn(steps, len(runs), layout.count + others)
    gradients[2, 0, 5] = torch.nan
    both = []
    for kernels in (True, False):
        scl._on_gpu = lambda matrix, there=kernels: there  # type: ignore[assignment]
        everything, found = variables.clone(), list[Tensor]()
        weights = everything[:, : layout.count]
        timeline = Timeline(Plan(0, steps, 0, 0), rows=len(runs), device=cpu, dtype=torch.float32, epoch=1)
        method = SCL(Context(layout, requests, timeline, weights, min_density=0.01))
        assert (method._blocks is not None) == kernels
        for number in range(steps):
            gradient = gradients[number].clone()
            outcome = method.update_masks(MatrixStep(gradient[:, : layout.count], weights, layout))
            assert outcome.finite.tolist() == [number != 2] + [True] * (len(runs) - 1)
            weights.sub_(0.1 * gradient[:, : layout.count].nan_to_num())
            timeline.clock += 1
            found += [
                gradient.nan_to_num(nan=1e9),
                everything.clone(),
                method.mask_variable.clone(),
                outcome.squares[1:],
            ]
        both.append([*found, method.mask.float()])
        assert not torch.equal(found[2], found[-2])
    for one, other in zip(*both, strict=True):
        torch.testing.assert_close(one, other, **({"rtol": 0.0, "atol": 0.0} if same_bits and one.shape[1] > 1 else {}))


def all_learned_masks() -> None:
    different = [
        SCLOptions(mask_lr=0.01, mask_decay=0.0, pruned_grad_scale=0.5),
        SCLOptions(mask_lr=0.1, mask_decay=0.05, mask_decay_cap=1.0, pruned_grad_scale=0.0),
        SCLOptions(mask_lr=0.03, mask_decay=0.01, mask_decay_cap=0.0, pruned_grad_scale=1.0, anneal="step"),
        SCLOptions(anneal="constant"),
    ]
    learned_masks(different)
    learned_masks(different, decay=0.2)
    learned_masks([SCLOptions(scale="none", mask_lr=rate, mask_decay=0.0) for rate in (0.5, 1.0)], same_bits=True)
    learned_masks([SCLOptions(scale="none", mask_lr=0.5, pruned_grad_scale=0.25)] * 2, same_bits=True)
    learned_masks([SCLOptions(pruned_grad_scale=1.0)] * 34)  # more than one launch treats


if __name__ == "__main__":
    torch.manual_seed(0)
    budgets()
    all_learned_masks()
    for sizes in [(2, 2, 8, 8, 3, 16, 1), (2, 1, 8, 8, 16, 16, 1), (1, 2, 8, 8, 16, 32, 2), (2, 1, 4, 4, 64, 64, 1),
                  (2, 1, 6, 6, 12, 20, 1), (1, 1, 7, 5, 8, 16, 2), (1, 1, 4, 4, 80, 72, 1)]:  # fmt: skip
        convolution(*sizes)
    for with_shortcut in (False, True):
        for sums_known in (False, True):
            norm(2, 8, 16, with_shortcut=with_shortcut, sums_known=sums_known)
            norm(1, 5, 72, with_shortcut=with_shortcut, sums_known=sums_known)
    pool(2, 8, 16, 16)
    pool(1, 4, 20, 5)
    pre_activation = [
        lambda: DenseNet(1),
        lambda: DenseNet(1, bottleneck=True, compression=0.5),
        lambda: WideResNet(10, 1),
    ]
    for make in (small_network, lambda: ResNet(8), *pre_activation):
        check(stack(make, kernels=True), stack(make, kernels=False))
    # In half precision, which biases do not have; the interpreter knows no bfloat16.
    rounded = (stack(biased_network, kernels, torch.float16) for kernels in (True, False))
    for ours, theirs, exact in zip(*rounded, stack(biased_network, kernels=False), strict=True):
        assert (ours - exact).norm() <= 1.2 * (theirs - exact).norm() + 0.001 * exact.norm()
    layers._MANY_CHANNELS, layers._FILLS_A_GPU = 16, 1.0  # so that most convolutions are done network by network
    for make in (partial(ResNet, 8), partial(WideResNet, 10, 1)):
        check(stack(make, kernels=True), stack(make, kernels=False))
