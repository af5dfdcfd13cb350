"""Models that FSDP2 shards over two processes are listed, counted and verified like whole ones."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

from gossamer.lab.training.distributed import end_process
from gossamer.prunable import select
from gossamer.report import report
from gossamer.verify import verify

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch was built without distributed")


class Net(nn.Module):
    """Rows that do not divide by two, a grouped transposed convolution and tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.up = nn.ConvTranspose1d(4, 6, 2, groups=2)
        self.mix = nn.Linear(6, 4)
        self.decoder = nn.Linear(4, 7)
        self.decoder.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        wide = self.up(self.embedding(tokens).transpose(1, 2)).transpose(1, 2)
        return self.decoder(self.mix(wide))


def sparse_net() -> Net:
    torch.manual_seed(0)
    model = Net()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(torch.rand_like(parameter) > 0.6)
        model.mix.weight[1] = 0
    return model


def compare_sharded_with_whole(rank: int, store: str) -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    tokens = torch.arange(6).view(2, 3)
    expected = report(sparse_net(), tokens)
    model = sparse_net()
    mesh = dist.init_device_mesh("cpu", (2,))
    fully_shard(model.mix, mesh=mesh)
    fully_shard(model, mesh=mesh)
    weights = select(model)
    assert all(isinstance(weight.parameter, DTensor) for weight in weights)
    assert [len(weight.uses) for weight in weights] == [2, 1, 1]
    assert report(model, tokens) == expected
    assert report(model) == report(sparse_net())
    same = verify(sparse_net(), model, tokens, tolerance=1e-6)
    assert same, str(same)
    assert same.tensors == 3
    end_process(0)


def test_two_processes(tmp_path: Path) -> None:
    spawn(compare_sharded_with_whole, args=(str(tmp_path / "store"),), nprocs=2)
