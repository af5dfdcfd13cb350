"""How connections are cut into blocks for the fused kernels of mask learning."""

import torch
from torch import Tensor, nn

from gossamer.methods.blocks import BLOCK, TOGETHER, Blocks
from gossamer.prunable import Weight
from gossamer.state import State


def test_blocks_cover_every_connection_once() -> None:
    sizes = [5, BLOCK, 0, 3 * BLOCK + 1, 2 * BLOCK]
    offsets = [0, 5, 5 + BLOCK, 5 + BLOCK, 6 + 4 * BLOCK]
    blocks = Blocks.of(sizes, offsets, torch.device("cpu"))
    assert blocks.first == [0, 1, 2, 2, 6, 8]
    seen = torch.zeros(sum(sizes), dtype=torch.int64)
    for number, (place, in_dense, start, size, slot, run) in enumerate(blocks.table.tolist()):
        tensor = max(index for index, first in enumerate(blocks.first[:-1]) if first <= number and sizes[index])
        assert (slot, place, in_dense, run) == (tensor, offsets[tensor] + start, place, 0)
        assert 0 < size <= BLOCK
        seen[place : place + size] += 1
    assert torch.equal(seen, torch.ones_like(seen))
    assert blocks.multiple == 1
    many = Blocks.of([1] * (TOGETHER + 2), range(TOGETHER + 2), torch.device("cpu"))
    assert many.table[:, 4].tolist() == [*range(TOGETHER), 0, 1]
    assert Blocks.of([32, 48], [0, 32], torch.device("cpu")).multiple == 16


def weights(*tensors: Tensor) -> list[Weight]:
    return [Weight(f"w{i}", nn.Parameter(tensor), (), 0, 1) for i, tensor in enumerate(tensors)]


def test_only_what_lies_in_memory_like_the_state_gets_kernels() -> None:
    filters, matrix = torch.randn(6, 4, 3, 3), torch.randn(5, 7)
    state = State(weights(filters.to(memory_format=torch.channels_last), matrix), any_order=True)
    like = [filters.to(memory_format=torch.channels_last), matrix]
    assert state.alike(like)
    assert state.alike([None, matrix])
    assert not state.alike([None, None])
    assert not state.alike([filters, matrix])
    assert not state.alike([like[0], torch.randn(7, 5).t()])
    assert not state.alike([like[0], matrix.to_sparse()])
    # Along an axis of length one a stride means nothing.
    columns = State(weights(torch.randn(8, 3, 1, 1)), any_order=True)
    assert columns.alike([torch.empty_strided((8, 3, 1, 1), (3, 1, 3, 3))])
