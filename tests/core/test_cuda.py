"""What only a GPU can show: fused kernels, captured steps, no host synchronisation. Skipped where there is none."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from learning_cases import check_batched, check_judgements, check_log, check_run, check_step
from torch import Tensor, nn
from torch.nn import functional as F
from torch.sparse import to_sparse_semi_structured

import gossamer
from gossamer import budget
from gossamer.lab.batched.stack import NetworkStack
from gossamer.lab.models.densenet import DenseNet
from gossamer.lab.models.resnet import ResNet
from gossamer.lab.models.wide_resnet import WideResNet
from gossamer.lab.training.capture import Captured
from gossamer.methods import METHODS
from gossamer.prunable import Weight
from gossamer.state import State

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.mark.parametrize("seed", range(40))
def test_fused_budget_equals_the_one_in_torch_operations(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows, size = (int(torch.randint(1, top, (), generator=generator)) for top in (6, 30_000))
    values = torch.randn(rows, size, generator=generator).cuda()
    if seed % 3 == 0:
        values = (values * 3).round() / 2  # ties
    if seed % 7 == 0:
        values.fill_(0.25)
    if seed % 5 == 0:
        values[:, size // 3 :] = -torch.inf  # as what is gone for good
    keep = torch.randint(0, size + 1, (rows,), generator=generator).cuda()
    keep[0] = (size, 0, size // 3)[seed % 3]
    if seed % 4 == 0:
        values = 1.0 + 1e-6 * values  # many of the same first digits
    fused, plain = values.clone(), values.clone()
    masks = [values > 0.5, values > 0.5]
    thresholds, flips = budget._meet_with_kernels_(fused, masks[0], keep, None)
    thresholds_2, _, flips_2 = budget._lower_rows_by_digits_(plain, masks[1], keep, None, None)
    assert torch.equal(thresholds, thresholds_2)
    assert flips.tolist() == flips_2.tolist()
    assert torch.equal(masks[0], masks[1])
    assert torch.equal(fused, plain)
    assert torch.equal(masks[0].sum(1), keep)
    # With connections that are kept whatever happens.
    protected = torch.randint(size, (rows, 1 + size // 100), generator=generator).cuda()
    fused, plain, keep = values.clone(), values.clone(), keep.clamp_min(protected.shape[1])
    met = budget.meet_budgets_(fused, masks[0], keep, protected)
    monkeypatch.setattr(budget, "_has_kernels", lambda values: False)
    assert torch.equal(met.threshold, budget.meet_budgets_(plain, masks[1], keep, protected).threshold)
    assert torch.equal(masks[0], masks[1])
    assert torch.equal(fused, plain)


def test_float32_weights_on_a_gpu_get_fused_mask_learning_and_others_do_not() -> None:
    for dtype, device, expected in (
        (torch.float32, "cuda", True),
        (torch.bfloat16, "cuda", True),
        (torch.float64, "cuda", False),
        (torch.float32, "cpu", False),
    ):
        parameter = nn.Parameter(torch.randn(64, 33, dtype=dtype, device=device))
        state = State([Weight("w", parameter, (), 0, 1)], any_order=True)
        assert state.has_kernels([parameter]) == expected


@pytest.mark.parametrize("seed", range(100))
def test_fused_mask_learning_equals_the_one_in_torch_operations(seed: int) -> None:
    check_step(seed, torch.device("cuda"))
    check_log(seed, torch.device("cuda"))


def test_steps_are_judged_as_in_torch_operations() -> None:
    check_judgements(torch.device("cuda"))


@pytest.mark.parametrize(
    "settings", [{}, {"mask_decay": 0.0}, {"pruned_grad_scale": 1.0, "mask_decay_cap": 0.0}], ids=str
)
def test_fused_masks_of_a_batch_equal_those_in_torch_operations(settings: dict[str, Any]) -> None:
    check_batched(torch.device("cuda"), **settings)


@pytest.mark.parametrize(
    "settings", [{}, {"scale": "none", "mask_lr": 1.0}, {"pruned_grad_scale": 0.3}, {"optimizers": 2}], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_run_with_fused_mask_learning_equals_one_in_torch_operations(
    dtype: torch.dtype, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    check_run(torch.device("cuda"), dtype, **settings)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)).double()


def filters() -> nn.Module:
    """A network with filters to prune."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Unflatten(1, (1, 4, 5)),
        nn.Conv2d(1, 16, 3, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 6, 4),
    ).double()


def train(
    device: str,
    *,
    captured: bool,
    dtype: torch.dtype = torch.float64,
    build: Callable[[], nn.Module] = network,
    sparsity: float | None = 0.9,
    **settings: object,
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(400, 20, generator=generator, dtype=torch.float64).to(device, dtype)
    y = x[:, :4].argmax(1)
    model = build().to(device, dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    sparsifier = gossamer.Sparsifier(
        model,
        optimizer,
        total_steps=200,
        steps_per_epoch=10,
        sparsity=sparsity,
        warmup="40it",
        sparsify="80it",
        stabilise="40it",
        **settings,
    )
    position = torch.zeros(1, dtype=torch.int64, device=device)

    def step() -> None:
        rows = (position * 7 + torch.arange(64, device=device) * 5) % 400
        position.add_(1)
        optimizer.zero_grad()
        F.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()

    graph, learns = Captured(step, torch.device(device)), None
    for number in range(200):
        if not captured:
            step()
            continue
        phase = sparsifier.plan.at(number).phase
        if (phase.masks_train, phase) != learns and not (phase.masks_train and learns is not None and learns[0]):
            graph = Captured(step, torch.device(device))  # another phase, other kernels
        learns = (phase.masks_train, phase)
        if graph.replays:
            sparsifier.advance()  # a step that runs for real advances by itself
        graph()
    sparsifier.finish()
    return [parameter.detach().cpu() for parameter in model.parameters()]


@pytest.mark.parametrize("settings", [{}, {"scale": "batch"}, {"mask_momentum": 0.5}], ids=str)
def test_a_captured_step_equals_an_eager_one_and_the_cpu(settings: dict[str, object]) -> None:
    eager = train("cuda", captured=False, **settings)
    for ours, theirs in zip(train("cuda", captured=True, **settings), eager, strict=True):
        assert torch.equal(ours, theirs)
    for ours, theirs in zip(train("cpu", captured=False, **settings), eager, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
        assert torch.equal(ours == 0, theirs == 0)


@pytest.mark.parametrize("method", [name for name in METHODS if name != "dense"])
def test_a_captured_step_of_every_method_equals_an_eager_one(method: str) -> None:
    """Methods that change their topology now and then do so between two replays, in `advance`."""
    options: dict[str, Any] = {"build": filters, "sparsity": 0.05} if METHODS[method].structured else {}
    with torch.backends.cudnn.flags(deterministic=True):
        eager = train("cuda", captured=False, method=method, **options)
        graph = train("cuda", captured=True, method=method, **options)
    for ours, theirs in zip(graph, eager, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    "settings",
    [{"pattern": "1:4", "sparsity": 0.75}, {"pattern": "block:1x4"}, {"pattern": "row", "sparsity": 0.5}],
    ids=str,
)
def test_a_captured_step_with_a_pattern_equals_an_eager_one_and_the_cpu(settings: dict[str, object]) -> None:
    eager = train("cuda", captured=False, **settings)
    for ours, theirs in zip(train("cuda", captured=True, **settings), eager, strict=True):
        assert torch.equal(ours, theirs)
    for ours, theirs in zip(train("cpu", captured=False, **settings), eager, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
        assert torch.equal(ours == 0, theirs == 0)


@pytest.mark.filterwarnings("ignore:The PyTorch API of SparseSemiStructuredTensor:UserWarning")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_torch_runs_layers_with_a_pattern_as_semi_structured(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 64)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with gossamer.Sparsifier(model, optimizer, pattern="2:4", total_steps=40):
        for _ in range(40):
            optimizer.zero_grad()
            model(torch.randn(64, 256, device="cuda")).square().mean().backward()
            optimizer.step()
    model, images = model.to(dtype), torch.randn(64, 256, device="cuda", dtype=dtype)
    with torch.no_grad():
        expected = model(images)
        for layer in (model[0], model[2], model[4]):
            sparse = to_sparse_semi_structured(layer.weight)  # raises where a weight does not qualify
            assert torch.equal(sparse.to_dense(), layer.weight)
            layer.weight = nn.Parameter(sparse)
        torch.testing.assert_close(model(images), expected, rtol=0.05, atol=1e-3)


@pytest.mark.parametrize("settings", [{}, {"pruned_grad_scale": 0.25}, {"scale": "none", "mask_lr": 1.0}], ids=str)
def test_captured_fused_kernels_give_the_bits_of_eager_ones_in_every_run(settings: dict[str, object]) -> None:
    eager = train("cuda", captured=False, dtype=torch.float32, **settings)
    for captured in (True, True, False):
        again = train("cuda", captured=captured, dtype=torch.float32, **settings)
        assert all(map(torch.equal, again, eager))


def plain_network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 40, 3, padding=1, bias=False), nn.BatchNorm2d(40), nn.ReLU(), nn.Conv2d(40, 24, 1, bias=False),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10),
    )  # fmt: skip


def biased_network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 20, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(20, 24, 3, padding=1), nn.ReLU(), nn.Flatten(),
        nn.Linear(24 * 36, 10),
    )  # fmt: skip


STACKED: dict[str, Callable[[], nn.Module]] = {
    "plain": plain_network,
    "biased": biased_network,
    "residual": lambda: ResNet(8),
    "dense": lambda: DenseNet(2, bottleneck=True, compression=0.5),
    "wide": lambda: WideResNet(10, 8),  # 128 channels and more, some of which are done network by network
}


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("make", STACKED.values(), ids=STACKED)
def test_stacked_networks_compute_what_they_compute_on_a_cpu(make: Callable[[], nn.Module], count: int) -> None:
    """In half precision on the GPU, with the kernels for it: no further from double precision than half precision is
    on a CPU, where gradients of the first layers are off by a tenth."""
    torch.manual_seed(0)
    networks = [make() for _ in range(count)]
    images, labels = torch.randn(count, 32, 3, 16, 16), torch.randint(0, 10, (count, 32))

    def compute(device: torch.device, dtype: torch.dtype) -> list[Tensor]:
        stack = NetworkStack(networks, device=device, dtype=dtype)
        logits = stack(images.to(device, dtype)).double()
        loss = F.cross_entropy(logits.flatten(0, 1), labels.to(device).flatten(), reduction="sum")
        gradients = stack.gradients(loss).double()
        statistics = [each.double() for each in stack.buffers.values()]
        return [each.detach().cpu() for each in (logits, gradients, *statistics)]

    cpu = torch.device("cpu")
    exact, rounded = compute(cpu, torch.float64), compute(cpu, torch.bfloat16)
    for ours, theirs, right in zip(compute(torch.device("cuda"), torch.bfloat16), rounded, exact, strict=True):
        assert (ours - right).norm() <= 1.5 * (theirs - right).norm() + 0.01 * right.norm()


def test_a_first_replay_draws_its_own_random_numbers_however_late_the_capture_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a GPU that another process keeps busy: the stream of the capture falls behind the one of the replays."""
    begin = torch.cuda.CUDAGraph.capture_begin

    def late(graph: torch.cuda.CUDAGraph, *args: object, **options: object) -> None:
        torch.cuda._sleep(500_000_000)  # on the stream of the capture
        begin(graph, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", late)
    ones, dropped = torch.ones(1000, device="cuda"), torch.zeros(1000, device="cuda")
    drawn: dict[bool, list[Tensor]] = {}

    def draw() -> None:
        dropped.copy_(F.dropout(ones))

    for captured in (False, True):
        torch.cuda.manual_seed(3)
        step = Captured(draw, torch.device("cuda" if captured else "cpu"))  # on a CPU a step simply runs
        drawn[captured] = []
        for _ in range(6):
            step()
            drawn[captured].append(dropped.clone())
    assert all(torch.equal(left, right) for left, right in zip(drawn[False], drawn[True], strict=True))
