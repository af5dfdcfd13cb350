"""Steps of mask learning with the fused kernels and without: drawn tensors, and whole short runs.

On a GPU, and on a CPU by Triton's interpreter; there the other side is the code for accelerators in torch operations,
which asks for the type of the device.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gossamer
from gossamer import learning, method
from gossamer.diagnostics import HealthLog
from gossamer.learning import Moves, Outcome, learn_masks_
from gossamer.methods import Layout, Request, Timeline, make_options, scl
from gossamer.schedule import Plan
from gossamer.settings import Settings
from gossamer.state import Store

SHAPES = (
    (7, 5),
    (64, 48),
    (3, 1000),
    (90, 100),
    (16, 3, 3, 3),
    (8, 12, 1, 1),
    (5, 1, 3, 3),
    (4, 6, 5),
    (1,),
    (130, 64),
)
STEPS = 24


class PretendedAccelerator(str):
    """A name of the CPU that says it is a GPU to code that asks for the type of a device."""

    type = "cuda"


@contextmanager
def kernels(fused: bool) -> Iterator[None]:
    with mock.patch.object(learning, "_on_gpu", return_value=fused):
        yield


def pretend(store: Store) -> None:
    if store.device.type == "cpu":
        store.device = PretendedAccelerator("cpu")  # type: ignore[assignment]


@dataclass
class Step:
    """What a step starts from."""

    settings: Settings
    removed: float
    decay: float
    parameters: list[nn.Parameter]
    gradients: list[Tensor | None]
    mask: Tensor
    mask_variable: Tensor
    dense: Tensor
    unscale: Tensor | None
    found_inf: Tensor | None
    cap: Tensor | None
    anchor: Tensor | float

    def store(self) -> Store:
        store = Store(self.parameters, momentum=False)
        pretend(store)
        store.mask.copy_(self.mask)
        store.mask_variable.copy_(self.mask_variable)
        store.dense.copy_(self.dense)
        return store


def draw(seed: int, device: torch.device) -> Step:
    generator = torch.Generator().manual_seed(seed)

    def chance(of: float) -> bool:
        return bool(torch.rand((), generator=generator) < of)

    def number(top: int) -> int:
        return int(torch.randint(top, (), generator=generator))

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    dtype = (torch.float32, torch.float32, torch.bfloat16, torch.float16)[number(4)]
    shapes = [SHAPES[number(len(SHAPES))] for _ in range(1 + number(50 if chance(0.2) else 6))]
    if chance(0.3):
        shapes = [(16 * (1 + number(9)), 16 * (1 + number(30))) for _ in shapes]  # all sizes multiples of 16

    def lay_out(tensor: Tensor, channels_last: bool) -> Tensor:
        layout = torch.channels_last if channels_last and tensor.dim() == 4 else torch.contiguous_format
        return tensor.to(device, dtype).contiguous(memory_format=layout)

    channels_last = chance(0.5)
    parameters = [nn.Parameter(lay_out(randn(*shape), channels_last)) for shape in shapes]
    gradients: list[Tensor | None] = [lay_out(randn(*shape) * 10.0 ** -number(4), channels_last) for shape in shapes]
    if len(shapes) > 1 and chance(0.5):
        gradients[number(len(shapes))] = None
    if chance(0.15) and gradients[0] is not None:
        gradients[0][-1] = (torch.nan, torch.inf)[number(2)]
    count = sum(parameter.numel() for parameter in parameters)
    scaled = chance(0.4)
    dense = randn(count)
    interpreted, anchor = device.type == "cpu", (0.0, 0.01)[number(2)]
    if interpreted:
        dense = dense.to(dtype).float()  # the interpreter cuts digits off where a GPU rounds to bfloat16
    return Step(
        settings=Settings(
            scale=("global", "none")[number(2)],
            anchor=anchor,
        ),
        removed=(1.0, 0.25 if interpreted else 0.3, 0.0)[number(3)],
        decay=(0.0, 0.03)[number(2)],
        parameters=parameters,
        gradients=gradients,
        mask=(torch.rand(count, generator=generator) > 0.6).to(device),
        mask_variable=randn(count).to(device),
        dense=dense.to(device),
        unscale=torch.tensor(1 / 1024, device=device) if scaled else None,
        found_inf=torch.tensor(float(chance(0.3)), device=device) if scaled else None,
        cap=torch.tensor([0.7], device=device) if chance(0.5) else None,
        anchor=torch.tensor(anchor, device=device) if chance(0.5) else anchor,  # it varies where λ1 is fixed
    )


def take(step: Step, *, fused: bool) -> tuple[Store, list[Tensor], list[Tensor | None], Outcome]:
    store = step.store()
    parameters = [parameter.detach().clone() for parameter in step.parameters]
    gradients = [None if gradient is None else gradient.clone() for gradient in step.gradients]
    with kernels(fused):
        assert learning.has_kernels(store, parameters) == fused
        outcome = learn_masks_(
            store,
            (),
            gradients,
            parameters,
            step.settings,
            Moves(
                learning_rate=torch.tensor(0.01, device=step.mask.device),
                decay=step.decay,
                anchor=step.anchor,
                caps=step.cap,
                removed=step.removed,
            ),
            connections=store.count,
            unscale=step.unscale,
            found_inf=step.found_inf,
        )
    return store, parameters, gradients, outcome


def same_bits(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))


def check_step(seed: int, device: torch.device) -> None:
    """Weights, gradients and masks to the last bit; mask variables too, where nothing is scaled."""
    step = draw(seed, device)
    store, parameters, gradients, outcome = take(step, fused=True)
    other, parameters_2, gradients_2, outcome_2 = take(step, fused=False)
    assert all(map(same_bits, parameters, parameters_2))
    assert [gradient is None for gradient in gradients] == [gradient is None for gradient in gradients_2]
    pairs = zip(gradients, gradients_2, strict=True)
    assert all(one is None or two is None or same_bits(one, two) for one, two in pairs)
    assert torch.equal(store.mask, other.mask)
    assert same_bits(store.dense, other.dense)
    assert torch.equal(outcome.healthy, outcome_2.healthy)
    torch.testing.assert_close(outcome.sums_of_squares, outcome_2.sums_of_squares, rtol=1e-5, atol=0, equal_nan=True)
    torch.testing.assert_close(store.mask_variable, other.mask_variable, rtol=1e-5, atol=1e-6)
    if not outcome.healthy:
        assert torch.equal(store.mask_variable, step.mask_variable)
        return
    # By the equations, with the sums of squares that the kernels found.
    work = store.vector()
    present = [(view, each) for view, each in zip(store.views(work), step.gradients, strict=True) if each is not None]
    for view, gradient in present:
        view.copy_(gradient)
    if step.unscale is not None:
        work.mul_(step.unscale)
    work = method.mask_gradient(work, step.dense, step.mask_variable)
    if step.settings.scale == "global":
        scale = method.global_scale(outcome.sums_of_squares, store.count)
        work.div_(method.divisor(scale))
    method.descent_direction_(work, decay=step.decay)
    expected = method.update_mask_variable_(
        step.mask_variable.clone(), work, learning_rate=torch.tensor(0.01, device=device)
    )
    if step.settings.anchor:
        size = step.dense.abs() if step.cap is None else step.dense.abs().minimum(step.cap)
        method.anchor_mask_variable_(expected, size, share=step.settings.anchor)
    torch.testing.assert_close(store.mask_variable, expected, rtol=1e-6, atol=1e-7)
    if step.settings.scale == "none":
        assert torch.equal(store.mask_variable, expected)
        assert torch.equal(store.mask_variable, other.mask_variable)


def check_judgements(device: torch.device) -> None:
    """Whether steps are healthy, and their scale, for sums of squares at the edges."""
    from gossamer.learning_triton import judge_on_gpu  # needs Triton

    large = torch.finfo(torch.float32).max
    many = torch.rand(3000, generator=torch.Generator().manual_seed(0))
    for squares in ([0.0], [0.0] * 5, [2.0, 1.0], [1.0, torch.inf], [torch.nan, 1.0], [large, large], [1e-40], many):
        totals = torch.as_tensor(squares, device=device)
        for found_inf in (None, torch.zeros(1, device=device), torch.ones(1, device=device)):
            healthy, divisor = judge_on_gpu(totals, found_inf, 77)
            assert torch.equal(healthy, learning._healthy(totals, found_inf, None, None))
            if healthy:
                expected = method.divisor(method.global_scale(totals, 77))
                torch.testing.assert_close(divisor, expected, rtol=1e-6, atol=0)


def check_log(seed: int, device: torch.device) -> None:
    """What some steps write to the log with the kernel and without."""
    generator = torch.Generator().manual_seed(seed)
    tensors = (1, 3, 128, 200)[seed % 4]
    logs = [HealthLog(tensors, 5, 40, device) for _ in range(2)]
    for step in range(5, 15):
        squares = torch.rand(tensors, generator=generator)
        squares[0] = torch.nan if step == 8 else squares[0]
        told = {
            "decay": torch.randn((), generator=generator).to(device),
            "connections": torch.randint(1 << 40, (), generator=generator).to(device),
            "flips": torch.randint(1 << 20, (), generator=generator).to(device),
            "squares": squares.to(device),
            "healthy": torch.tensor(step != 8, device=device),
        }
        for log, fused in zip(logs, (True, False), strict=True):
            log.set_step(step)
            with mock.patch.object(HealthLog, "_has_kernel", return_value=fused):
                log.write(**told)
    one, other = (log.state() for log in logs)
    assert one["skipped"] == 1
    assert one["flips"] > 0
    for name in ("trace", "flips", "skipped"):
        assert torch.equal(one[name], other[name]), name
    for name in ("gradient_squares", "gradient_weight"):
        torch.testing.assert_close(one[name], other[name], rtol=1e-6, atol=0)


def race(device: torch.device, *, fused: bool, **settings: object) -> list[list[Tensor]]:
    """What rows of a race with different sparsities have learned after each of some steps, and their gradients."""
    layout, plan = Layout(("a", "b"), ((40, 60), (77, 40))), Plan(0, 8, 4, 4)
    generator = torch.Generator().manual_seed(3)
    matrix = torch.randn(3, layout.count + 11, generator=generator).to(device)  # other parameters lie beside them
    weights = matrix[:, : layout.count]
    timeline = Timeline(plan, rows=3, device=device, dtype=torch.float32, epoch=2)
    own: list[dict[str, object]] = [{}, {"mask_lr": 0.2, "anchor": 0.3}, {"anchor_cap": 0.0, "removed_gradient": 0.7}]
    with mock.patch.object(scl, "_on_gpu", return_value=fused):
        requests = [
            Request(sparsity, row, make_options(scl.SCL, own[row] | settings))
            for row, sparsity in enumerate((0.5, 0.9, 0.98))
        ]
        rule = scl.SCL(layout, requests, timeline, weights, floor=0.01)
    assert rule._has_kernels == fused
    seen = []
    for _ in range(timeline.length):
        gradient = (torch.randn(matrix.shape, generator=generator) * 0.1).to(device)[:, : layout.count]
        rule.learn_(gradient, weights)
        weights.sub_(gradient)
        timeline.clock += 1
        seen.append([rule.mask.clone(), gradient, rule._budget.score.clone(), rule._level.clone()])
    return seen


def check_race(device: torch.device, **settings: object) -> None:
    runs = (race(device, fused=fused, **settings) for fused in (True, False))
    for (mask, gradient, *learned), (mask_2, gradient_2, *learned_2) in zip(*runs, strict=True):
        assert 0 < mask.sum() < mask.numel()
        assert torch.equal(mask, mask_2)
        assert torch.equal(gradient, gradient_2)
        for one, other in zip(learned, learned_2, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def network(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, bias=False), nn.ReLU(), nn.Conv2d(16, 33, 3), nn.ReLU(), nn.Conv2d(33, 20, 1), nn.ReLU(),
        nn.Flatten(), nn.Linear(320, 17), nn.ReLU(), nn.Linear(17, 4),
    ).to(dtype=dtype, memory_format=torch.channels_last)  # fmt: skip


def train(
    device: torch.device, *, fused: bool, dtype: torch.dtype, optimizers: int, **settings: object
) -> list[dict[str, Tensor]]:
    """Masks, variables and weights after each of some steps, with a gradient that is not finite and one that is missing
    on the way, into the phase where masks are frozen."""
    model = network(dtype).to(device)
    shares = [list(model.parameters())[number::optimizers] for number in range(optimizers)]
    each = [torch.optim.SGD(share, lr=0.05, momentum=0.9, fused=True) for share in shares]
    sparsifier = gossamer.Sparsifier(
        model, each, total_steps=STEPS, sparsity=0.8, warmup="0it", sparsify="12it", stabilise="6it", **settings
    )
    assert sparsifier._connectivity is not None
    pretend(sparsifier._connectivity.store)
    generator = torch.Generator().manual_seed(2)
    seen = []
    with warnings.catch_warnings(), kernels(fused):
        warnings.filterwarnings("ignore", "gradients that are not finite")
        for number in range(STEPS):
            images = torch.randn(16, 3, 8, 8, generator=generator).to(device, dtype)
            model.zero_grad()
            F.cross_entropy(model(images).float(), images[:, 0, 0, :4].argmax(1)).backward()
            if number == 5:
                model[2].weight.grad[0] = torch.nan
            if number == 6:
                model[2].weight.grad = None
            for optimizer in each:
                # As a GradScaler does it: the optimizer itself leaves the weights alone in a bad step.
                optimizer.grad_scale = None  # type: ignore[attr-defined]
                optimizer.found_inf = torch.tensor(float(number == 5), device=device)  # type: ignore[attr-defined]
                optimizer.step()
            state = sparsifier.state_dict()
            values = {f"{part}.{name}": tensor for part in ("mask", "mask_variable", "dense") if part in state
                      for name, tensor in state[part].items()}  # fmt: skip
            seen.append({**values, **{name: tensor.clone() for name, tensor in model.state_dict().items()}})
    sparsifier.finish()
    return seen


def check_run(device: torch.device, dtype: torch.dtype, *, optimizers: int = 1, **settings: object) -> None:
    ours, theirs = (train(device, fused=flag, dtype=dtype, optimizers=optimizers, **settings) for flag in (True, False))
    assert len(ours) == STEPS
    for one, other in zip(ours, theirs, strict=True):
        assert one.keys() == other.keys()
        for name, tensor in one.items():
            if name.startswith("mask."):
                assert torch.equal(tensor, other[name]), name
            exact = settings.get("scale") == "none"
            torch.testing.assert_close(
                tensor, other[name], **({"rtol": 0, "atol": 0} if exact else {"rtol": 1e-4, "atol": 1e-6})
            )
