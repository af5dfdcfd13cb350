"""Two processes learn the same masks, and meet the target, in the loops of other libraries."""

import pytest
import torch
from distributed.processes import Results, in_two_processes

from integrations.two_processes import JOBS, STEPS, with_accelerate

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return in_two_processes(JOBS, tmp_path_factory.mktemp("jobs"))


def zeros(weights: dict[str, torch.Tensor]) -> tuple[int, int]:
    return sum(int((each == 0).sum()) for each in weights.values()), sum(each.numel() for each in weights.values())


@pytest.mark.parametrize("when", ["before", "after"])
def test_accelerate_equals_one_process_with_the_joint_batch(when: str, results: Results) -> None:
    alone = with_accelerate(after=when == "after")
    for result in results.of(f"accelerate {when} prepare"):
        whole, resumed = result["whole"], result["resumed"]
        assert whole["steps"] == resumed["steps"] == STEPS
        for name, weight in alone["weights"].items():
            torch.testing.assert_close(whole["weights"][name], weight, rtol=1e-9, atol=1e-9)
            assert torch.equal(whole["weights"][name] == 0, weight == 0)
            assert torch.equal(whole["weights"][name], resumed["weights"][name])
        assert zeros(whole["weights"])[0] == int(0.8 * 336 + 0.5)


@pytest.mark.parametrize(("library", "steps"), [("lightning", 24), ("transformers", 16)])
def test_both_processes_end_with_the_same_sparse_model(library: str, steps: int, results: Results) -> None:
    first, second = results.of(library)
    assert first["planned"] == first["steps"] == second["steps"] == steps  # half of the batches each
    found, total = zeros(first["weights"])
    assert found == int(0.9 * total + 0.5)
    for name, weight in first["weights"].items():
        assert torch.equal(weight, second["weights"][name])
