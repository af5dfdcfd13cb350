"""What only a GPU can show: fused kernels, captured steps, no host synchronisation. Skipped where there is none."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gossamer
from gossamer import budget
from gossamer.side_by_side.capture import Captured

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
    keep = torch.randint(0, size + 1, (rows,), generator=generator).cuda()
    keep[0] = (size, 0, keep[0])[seed % 3]
    fused, plain = values.clone(), values.clone()
    masks = [torch.zeros(rows, size, dtype=torch.bool, device="cuda") for _ in range(2)]
    thresholds = budget.meet_budgets_(fused, masks[0], keep)
    monkeypatch.setattr(budget, "_has_kernels", lambda values: False)
    assert torch.equal(thresholds, budget.meet_budgets_(plain, masks[1], keep))
    assert torch.equal(masks[0], masks[1])
    assert torch.equal(fused, plain)
    assert torch.equal(masks[0].sum(1), keep)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)).double()


def train(device: str, *, captured: bool, **settings: object) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(400, 20, generator=generator, dtype=torch.float64).to(device)
    y = x[:, :4].argmax(1)
    model = network().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    sparsifier = gossamer.Sparsifier(
        model, optimizer, total_steps=200, sparsity=0.9, warmup="40it", sparsify="80it", stabilise="40it", **settings
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


@pytest.mark.parametrize("shortcut", [False, True])
def test_fused_norm_equals_batch_norm_and_relu(shortcut: bool) -> None:
    from gossamer.side_by_side.norm_kernels import NormAddReLU

    def images() -> Tensor:
        values = torch.randn(8, 48, 16, 16, device="cuda").to(torch.bfloat16)
        return values.contiguous(memory_format=torch.channels_last).requires_grad_()

    x, added = images(), images() if shortcut else None
    gamma, beta = (torch.rand(48, device="cuda").requires_grad_() for _ in range(2))
    mean, variance = torch.zeros(48, device="cuda"), torch.ones(48, device="cuda")
    y = NormAddReLU.apply(x, added, gamma, beta, mean, variance, 0.1, 1e-5)  # type: ignore[no-untyped-call]
    outer = torch.randn_like(y)
    y.backward(outer)
    exact = [None if t is None else t.detach().double().requires_grad_() for t in (x, added, gamma, beta)]
    assert exact[0] is not None
    reference = F.batch_norm(exact[0], None, None, exact[2], exact[3], True, 0.1, 1e-5)
    reference = F.relu(reference if exact[1] is None else reference + exact[1])
    reference.backward(outer.double())
    torch.testing.assert_close(y.double(), reference, rtol=1e-2, atol=1e-2)
    for ours, theirs in zip((x, added, gamma, beta), exact, strict=True):
        if ours is not None and theirs is not None and ours.grad is not None and theirs.grad is not None:
            error = (ours.grad.double() - theirs.grad).norm() / theirs.grad.norm()
            assert error < 5e-3
