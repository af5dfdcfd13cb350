"""Steps of SCL with the fused kernels and without: drawn tensors, and whole short runs.

On a GPU, and on a CPU by Triton's interpreter; there the other side is the code for accelerators in torch operations,
which asks for the type of the device.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gossamer
from gossamer import state
from gossamer.diagnostics import HealthLog
from gossamer.methods import Context, Layout, Request, Timeline, make_options, scl
from gossamer.methods.base import MatrixStep, Outcome
from gossamer.prunable import Weight
from gossamer.schedule import Plan
from gossamer.state import ParameterStep, State
from gossamer.target import make_target

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
MASK_LR = 0.01


class PretendedAccelerator(str):
    """A name of the CPU that says it is a GPU to code that asks for the type of a device."""

    type = "cuda"


@contextmanager
def kernels(fused: bool) -> Iterator[None]:
    with mock.patch.object(scl, "_on_gpu", return_value=fused), mock.patch.object(state, "_on_gpu", return_value=fused):
        yield


def pretend(memory: State) -> None:
    if memory.device.type == "cpu":
        memory.device = PretendedAccelerator("cpu")  # type: ignore[assignment]


@dataclass
class Step:
    """What a step starts from."""

    options: scl.SCLOptions
    decay: float
    parameters: list[nn.Parameter]
    gradients: list[Tensor | None]
    mask: Tensor
    mask_variable: Tensor
    dense: Tensor
    unscale: Tensor | None
    found_inf: Tensor | None
    usual: float  # up to which |w̃| counts where there is a cap

    def method(self) -> tuple[scl.SCL, State]:
        weights = [Weight(f"w{i}", each, (), 0, 1) for i, each in enumerate(self.parameters)]
        memory = State(weights, any_order=True)
        pretend(memory)
        memory.dense.copy_(self.dense)
        device = self.dense.device
        timeline = Timeline(Plan(0, 4, 1, 1), rows=1, device=device, dtype=torch.float32, epoch=1, tabulated=False)
        timeline.set(0)
        target = make_target(memory.sizes, decay=self.decay, floors=[])
        request = Request(0.0, 0, self.options, target)
        method = scl.SCL(Context(memory.layout, [request], timeline, memory.dense, min_density=0.0))
        method.mask.copy_(self.mask)
        method.mask_variable.copy_(self.mask_variable)
        method._usual.fill_(self.usual)
        return method, memory


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
    interpreted, mask_decay = device.type == "cpu", (0.0, 0.01)[number(2)]
    if interpreted:
        dense = dense.to(dtype).float()  # the interpreter cuts digits off where a GPU rounds to bfloat16
    mask = torch.rand(count, generator=generator) > 0.6
    size = randn(count).abs()
    return Step(
        options=scl.SCLOptions(
            scale=("global", "none")[number(2)],
            mask_lr=MASK_LR,
            pruned_grad_scale=(1.0, 0.25 if interpreted else 0.3, 0.0)[number(3)],
            mask_decay=mask_decay,
            mask_decay_cap=float(number(2)),
        ),
        decay=(0.0, 0.03)[number(2)],
        parameters=parameters,
        gradients=gradients,
        mask=mask.to(device),
        mask_variable=torch.where(mask, size, -size).to(device),
        dense=dense.to(device),
        unscale=torch.tensor(1 / 1024, device=device) if scaled else None,
        found_inf=torch.tensor(float(chance(0.3)), device=device) if scaled else None,
        usual=0.7,
    )


@dataclass
class Taken:
    """What a step leaves."""

    method: scl.SCL
    memory: State
    parameters: list[Tensor]
    gradients: list[Tensor | None]
    outcome: Outcome


def take(step: Step, *, fused: bool) -> Taken:
    gradients = [None if gradient is None else gradient.clone() for gradient in step.gradients]
    with kernels(fused):
        method, memory = step.method()
        assert memory.has_kernels(memory.tensors()) == fused
        held = [parameter.detach().clone() for parameter in step.parameters]
        with torch.no_grad():
            taken = ParameterStep(memory, gradients, unscale=step.unscale, found_inf=step.found_inf, samples=None)
            outcome = method.update_masks(taken)
            taken.write_back()
        parameters = [parameter.detach().clone() for parameter in step.parameters]
        for parameter, before in zip(step.parameters, held, strict=True):
            parameter.data.copy_(before)
    return Taken(method, memory, parameters, gradients, outcome)


def same_bits(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))


def check_step(seed: int, device: torch.device) -> None:
    """Weights, gradients and masks to the last bit; mask variables too, where nothing is scaled."""
    step = draw(seed, device)
    one, other = take(step, fused=True), take(step, fused=False)
    assert all(map(same_bits, one.parameters, other.parameters))
    assert [gradient is None for gradient in one.gradients] == [gradient is None for gradient in other.gradients]
    pairs = zip(one.gradients, other.gradients, strict=True)
    assert all(a is None or b is None or same_bits(a, b) for a, b in pairs)
    assert same_bits(one.memory.dense, other.memory.dense)
    assert torch.equal(one.outcome.finite, other.outcome.finite)
    squares, variable = one.outcome.squares, one.method.mask_variable
    torch.testing.assert_close(squares, other.outcome.squares.reshape_as(squares), rtol=1e-5, atol=0, equal_nan=True)
    torch.testing.assert_close(variable, other.method.mask_variable, rtol=1e-5, atol=1e-6)
    if not one.outcome.finite:
        assert torch.equal(variable, step.mask_variable[None])
        return
    # By the equations, with the sums of squares that the kernels found.
    memory, options = one.memory, step.options
    work = memory.matrix()
    present = [(view, each) for view, each in zip(memory.views(work), step.gradients, strict=True) if each is not None]
    for view, gradient in present:
        view.copy_(gradient)
    if step.unscale is not None:
        work.mul_(step.unscale)
    work = scl.mask_gradient(work, step.dense[None], step.mask_variable[None])
    if options.scale == "global":
        work.div_(scl.divisor(scl.global_scale(squares.view(1, -1), memory.count)))
    scl.descent_direction_(work, decay=step.decay)
    expected = scl.update_mask_variable_(step.mask_variable.clone()[None], work, learning_rate=MASK_LR)
    if options.mask_decay:
        size = step.dense.abs()[None]
        size = size.clamp_max(step.usual * options.mask_decay_cap) if options.mask_decay_cap else size
        scl.decay_mask_variable_(expected, size, share=options.mask_decay)
    torch.testing.assert_close(variable, expected, rtol=1e-6, atol=1e-7)
    assert torch.equal(one.method.mask, variable > 0)
    if options.scale == "none":
        assert torch.equal(variable, expected)
        assert torch.equal(variable, other.method.mask_variable)


def check_judgements(device: torch.device) -> None:
    """Whether steps are finite, and their scale, for sums of squares at the edges."""
    from gossamer.methods.scl_triton import judge_on_gpu  # needs Triton

    large = torch.finfo(torch.float32).max
    many = torch.rand(3000, generator=torch.Generator().manual_seed(0)).tolist()
    for squares in ([0.0], [0.0] * 5, [2.0, 1.0], [1.0, torch.inf], [torch.nan, 1.0], [large, large], [1e-40], many):
        totals = torch.tensor([squares, squares[::-1]], device=device)
        for found_inf in (None, torch.zeros(1, device=device), torch.ones(1, device=device)):
            finite, divisor = judge_on_gpu(totals, found_inf, 77)
            step = SimpleNamespace(found_inf=found_inf, samples=None)
            assert torch.equal(finite, scl._finite(totals, step, None))  # type: ignore[arg-type]
            expected = scl.divisor(scl.global_scale(totals, 77))
            torch.testing.assert_close(divisor[finite], expected[finite], rtol=1e-6, atol=0)


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
            "nonzeros": torch.randint(1 << 40, (), generator=generator).to(device),
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


def batched(device: torch.device, *, fused: bool, **settings: object) -> list[list[Tensor]]:
    """What runs with different settings have learned after each of some steps, and their gradients."""
    layout, plan = Layout(("a", "b"), ((40, 60), (77, 40))), Plan(0, 8, 4, 4)
    generator = torch.Generator().manual_seed(3)
    matrix = torch.randn(3, layout.count + 11, generator=generator).to(device)  # other parameters lie beside them
    weights = matrix[:, : layout.count]
    timeline = Timeline(plan, rows=3, device=device, dtype=torch.float32, epoch=2)
    own: list[dict[str, object]] = [
        {},
        {"mask_lr": 0.2, "mask_decay": 0.3},
        {"mask_decay_cap": 0.0, "pruned_grad_scale": 0.7},
    ]
    requests = [
        Request(sparsity, row, make_options(scl.SCL, own[row] | settings))
        for row, sparsity in enumerate((0.5, 0.9, 0.98))
    ]
    seen = []
    with kernels(fused):
        method = scl.SCL(Context(layout, requests, timeline, weights, min_density=0.01))
        assert (method._blocks is not None) == fused
        for _ in range(timeline.length):
            gradient = (torch.randn(matrix.shape, generator=generator) * 0.1).to(device)[:, : layout.count]
            method.update_masks(MatrixStep(gradient, weights, layout))
            weights.sub_(gradient)
            timeline.clock += 1
            seen.append([method.mask.clone(), gradient, method.mask_variable.clone(), method._level.clone()])
    return seen


def check_batched(device: torch.device, **settings: object) -> None:
    runs = (batched(device, fused=fused, **settings) for fused in (True, False))
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
    assert sparsifier._driver is not None
    pretend(sparsifier._driver.state)
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
