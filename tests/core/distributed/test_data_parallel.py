"""DistributedDataParallel: two processes learn what one learns from the joint batch, and nobody sends masks around."""

import pytest
import torch

from distributed.cases import DATA_PARALLEL, NETWORK
from distributed.jobs import alone
from distributed.processes import Results


@pytest.mark.parametrize("case", DATA_PARALLEL)
def test_two_processes_equal_one_with_the_joint_batch(case: str, results: Results) -> None:
    single = alone(NETWORK.get(case, "mlp"), DATA_PARALLEL[case])
    for result in results.of(f"data parallel, {case}"):
        assert result["connections"] == single["connections"]
        for one, two in zip(single["trace"], result["trace"], strict=True):
            torch.testing.assert_close(two, one, rtol=1e-9, atol=1e-9)
            assert all(torch.equal(one[name] == 0, two[name] == 0) for name in one)


@pytest.mark.parametrize("case", DATA_PARALLEL)
def test_masks_are_equal_on_all_ranks_without_being_sent(case: str, results: Results) -> None:
    first, second = results.of(f"data parallel, {case}")
    # In each mask step, sums over samples are joined, or counts of active channels.
    mask_steps = 8 if case in ("per_sample", "method apoz") else 0
    assert first["collectives"] == second["collectives"] == mask_steps
    for one, two in zip(first["trace"], second["trace"], strict=True):
        assert all(torch.equal(one[name], two[name]) for name in one)


def test_an_optimizer_shared_over_the_processes(results: Results) -> None:
    single = alone("mlp", {"sparsity": 0.7})
    for result in results.of("shared optimizer"):
        assert result["connections"] == single["connections"]
        for one, two in zip(single["trace"], result["trace"], strict=True):
            torch.testing.assert_close(two, one, rtol=1e-9, atol=1e-9)
