"""How connections are cut into blocks for the fused kernels of mask learning."""

import torch
from torch import nn

from gossamer.state import BLOCK, TOGETHER, Blocks, Store


def test_blocks_cover_every_connection_once() -> None:
    sizes = [5, BLOCK, 0, 3 * BLOCK + 1, 2 * BLOCK]
    offsets = [0, 5, 5 + BLOCK, 5 + BLOCK, 6 + 4 * BLOCK]
    blocks = Blocks.of(sizes, offsets, torch.device("cpu"))
    assert blocks.first == [0, 1, 2, 2, 6, 8]
    seen = torch.zeros(sum(sizes), dtype=torch.int64)
    for number, (place, start, size, slot) in enumerate(blocks.table.tolist()):
        tensor = max(index for index, first in enumerate(blocks.first[:-1]) if first <= number and sizes[index])
        assert (slot, place) == (tensor, offsets[tensor] + start)
        assert 0 < size <= BLOCK
        seen[place : place + size] += 1
    assert torch.equal(seen, torch.ones_like(seen))
    assert blocks.multiple == 1
    many = Blocks.of([1] * (TOGETHER + 2), range(TOGETHER + 2), torch.device("cpu"))
    assert many.table[:, 3].tolist() == [*range(TOGETHER), 0, 1]
    assert Blocks.of([32, 48], [0, 32], torch.device("cpu")).multiple == 16


def test_only_what_lies_in_memory_like_the_store_gets_kernels() -> None:
    filters, matrix = torch.randn(6, 4, 3, 3), torch.randn(5, 7)
    store = Store([nn.Parameter(filters.to(memory_format=torch.channels_last)), nn.Parameter(matrix)], momentum=False)
    like = [filters.to(memory_format=torch.channels_last), matrix]
    assert store.is_laid_out_like(like)
    assert store.is_laid_out_like([None, matrix])
    assert not store.is_laid_out_like([None, None])
    assert not store.is_laid_out_like([filters, matrix])
    assert not store.is_laid_out_like([like[0], torch.randn(7, 5).t()])
    assert not store.is_laid_out_like([like[0], matrix.to_sparse()])
    # Along an axis of length one a stride means nothing.
    columns = Store([nn.Parameter(torch.randn(8, 3, 1, 1))], momentum=False)
    assert columns.is_laid_out_like([torch.empty_strided((8, 3, 1, 1), (3, 1, 3, 3))])
