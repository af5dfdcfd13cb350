"""Learning from another network, against sums written out in NumPy and the gradient that they have by hand."""

import copy
import re
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

import gossamer
from gossamer.distillation import distil, divergence


def softmax(logits: Tensor, temperature: float) -> NDArray[np.float64]:
    raised = np.exp(logits.detach().double().numpy() / temperature)
    softened: NDArray[np.float64] = raised / raised.sum(-1, keepdims=True)
    return softened


@pytest.mark.parametrize("shape", [(6, 4), (5, 3, 7)], ids=["images", "words"])
@pytest.mark.parametrize(("share", "temperature"), [(0.5, 4.0), (0.3, 1.0), (1.0, 2.5), (0.0, 3.0)])
def test_the_loss_and_its_gradient(shape: tuple[int, ...], share: float, temperature: float) -> None:
    torch.manual_seed(0)
    student, teacher = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for _ in range(2))
    labels = torch.randint(shape[-1], shape[:-1])
    by_labels = functional.cross_entropy(student.flatten(0, -2), labels.flatten())
    loss = distil(by_labels, student, teacher, share=share, temperature=temperature)

    p, q = softmax(teacher, temperature), softmax(student, temperature)
    lesson = temperature**2 * np.mean(np.sum(p * (np.log(p) - np.log(q)), axis=-1))
    assert loss.item() == pytest.approx((1 - share) * by_labels.item() + share * lesson)

    loss.backward()  # type: ignore[no-untyped-call]
    samples = labels.numel()
    right = functional.one_hot(labels, shape[-1]).numpy()
    wanted = (1 - share) * (softmax(student, 1.0) - right) / samples + share * temperature * (q - p) / samples
    assert student.grad is not None
    np.testing.assert_allclose(student.grad.numpy(), wanted, atol=1e-12)
    assert teacher.grad is None


def test_who_agrees_with_the_teacher_has_nothing_to_learn() -> None:
    logits = torch.randn(4, 5)
    assert float(divergence(logits, logits + 3.0, 2.0).abs().max()) < 1e-5


def test_each_sample_can_have_its_temperature() -> None:
    student, teacher = torch.randn(2, 3, 5, 4)
    each = divergence(student, teacher, torch.tensor([1.0, 2.0, 6.0])[:, None])
    for row, temperature in enumerate((1.0, 2.0, 6.0)):
        torch.testing.assert_close(each[row], divergence(student[row], teacher[row], temperature))


def test_half_precision_is_softened_in_single() -> None:
    student, teacher = torch.randn(2, 64, 100).bfloat16()
    loss = distil(torch.zeros(()), student, teacher, share=1.0)
    assert loss.dtype is torch.float32
    torch.testing.assert_close(loss, distil(torch.zeros(()), student.float(), teacher.float(), share=1.0))


def setting() -> tuple[nn.Module, torch.optim.Optimizer, gossamer.Sparsifier, list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batches = [(torch.randn(16, 6), torch.randint(3, (16,))) for _ in range(40)]
    return model, optimizer, gossamer.Sparsifier(model, optimizer, sparsity=0.7, total_steps=40), batches


def test_the_loop_of_the_docs_learns_from_its_trunk() -> None:
    page = (Path(__file__).parents[2] / "docs" / "integration.md").read_text()
    (example,) = (each for each in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "gossamer.distil(" in each)
    model, optimizer, sparsifier, batches = setting()
    names: dict[str, object] = {"copy": copy, "torch": torch, "F": functional, "gossamer": gossamer}
    names |= {"model": model, "optimizer": optimizer, "sparsifier": sparsifier, "batches": batches}
    exec(textwrap.dedent("  " + example), names)
    sparsifier.finish()

    expected, optimizer, sparsifier, batches = setting()
    trunk: nn.Module | None = None
    for step, (x, y) in enumerate(batches):
        if step == 10:  # a quarter of the run
            trunk = copy.deepcopy(expected).eval().requires_grad_(False)
        said = expected(x)
        loss = functional.cross_entropy(said, y)
        if trunk is not None:
            soft = (functional.log_softmax(each / 4.0, dim=1) for each in (said, trunk(x)))
            loss = (loss + 16.0 * functional.kl_div(*soft, reduction="batchmean", log_target=True)) / 2
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    sparsifier.finish()
    assert trunk is not None
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], tensor)


@pytest.mark.parametrize(
    ("shape", "share", "temperature", "message"),
    [
        ((2, 4), 0.5, 1.0, "expected logits of the same shape from student and teacher, got (2, 3) and (2, 4)"),
        ((2, 3), 1.2, 1.0, "share: expected a number from 0 to 1, got 1.2"),
        ((2, 3), 0.5, 0.0, "temperature: expected a number above 0, got 0.0"),
    ],
)
def test_refused(shape: tuple[int, ...], share: float, temperature: float, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        distil(torch.zeros(()), torch.zeros(2, 3), torch.zeros(shape), share=share, temperature=temperature)
