"""FSDP2: masks are sharded like their weights, and the budget is met over all processes together."""

import pytest
import torch

from distributed.cases import CUTS, SHARDED, WHOLE
from distributed.jobs import STEPS, alone
from distributed.processes import Results


@pytest.mark.parametrize("case", SHARDED)
def test_two_shards_learn_what_one_process_learns(case: str, results: Results) -> None:
    network, options = SHARDED[case][:2]
    single = alone(network, options)
    for result in results.of(f"sharded, {case}"):
        assert result["connections"] == single["connections"]
        for step, (one, two) in enumerate(zip(single["trace"], result["trace"], strict=True)):
            torch.testing.assert_close(two, one, rtol=1e-9, atol=1e-9, msg=f"step {step}")
            assert all(torch.equal(one[name] == 0, two[name] == 0) for name in one), step
        for name in ("connections", "flips", "layers"):  # a method other than scl has no log of its flips
            assert result["health"][name] == single["health"][name], name
        assert result["health"]["scales"] == pytest.approx(single["health"]["scales"], rel=1e-5)
        for name, mask in result["masks"].items():
            assert torch.equal(mask, single["trace"][-1][name] != 0)


@pytest.mark.parametrize(("job", "cut"), [(f"resumed at {cut}", cut) for cut in CUTS] + [("checkpointed", 7)])
def test_a_sharded_checkpoint_goes_on_bit_for_bit(job: str, cut: int, results: Results) -> None:
    for one, two in zip(results.of("straight"), results.of(job), strict=True):
        assert one["connections"] == two["connections"]
        assert len(two["trace"]) == STEPS - cut
        for before, after in zip(one["trace"][cut:], two["trace"], strict=True):
            assert all(torch.equal(before[name], after[name]) for name in before)


def test_keep_zeros_on_shards(results: Results) -> None:
    for result in results.of("kept"):
        before, after = result["before"], result["after"]
        weights = [name for name in before if name.endswith("weight")]
        assert all(torch.equal(before[name] == 0, after[name] == 0) for name in weights)
        assert any(not torch.equal(before[name], after[name]) for name in weights)


def test_weights_sharded_in_other_ways_are_refused(results: Results) -> None:
    for messages in results.of("refusals"):
        assert "apply fully_shard to the whole model" in messages["mixture"]
        assert "sharded along one dimension" in messages["both ways"]
        assert "pattern= needs whole weights in every process" in messages["pattern"]
        for name in WHOLE:
            assert f"method='{name}' needs whole weights in every process" in messages[name]
