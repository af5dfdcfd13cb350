"""Averaged weights and the batch-norm statistics that belong to them.

avg ← avg + c(t)·(w̃ - avg) in every step. An exponential mean with decay d has c = max(1-d, 1/n) in its n-th step, so
that it is the plain mean while it is young; the mean over the tail of a run has c = 1/n from the first step of the tail
on. Before that c = 1: the average is the weights.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from gossamer.lab.batched.loader import Feed
from gossamer.lab.batched.settings_of_training import Training
from gossamer.lab.batched.stack import NetworkStack


def averaging_rates(trainings: Sequence[Training], *, first: Sequence[int], total: int) -> Tensor | None:
    """c for each step and run, (steps, runs); None where no run averages. No mean begins before its step of
    `first`."""
    if not any(training.averages for training in trainings):
        return None
    steps, columns = torch.arange(total), []
    for training, start in zip(trainings, first, strict=True):
        begin = start if training.average_decay else max(start, total - round(training.average_tail * total))
        young = 1.0 / (steps - begin + 1).clamp_min(1)
        rate = young.clamp_min(1.0 - training.average_decay) if training.average_decay else young
        columns.append(torch.where(steps < begin, 1.0, rate) if training.averages else torch.ones(total))
    return torch.stack(columns, dim=1)


def recalibrate_(stack: NetworkStack, feed: Feed, which: Tensor, chosen: Tensor, *, epoch: int, batches: int) -> None:
    """Give the chosen rows batch-norm statistics that are the mean over so many training batches.

    `which` is the seed of each row, as a place in the feed; `chosen` is True for the rows that are meant; the batches
    are those of `epoch`, which decides their order and augmentation.
    """
    norms = [module for module in stack.template.modules() if isinstance(module, _BatchNorm)]
    before = {name: buffer.clone() for name, buffer in stack.buffers.items()}
    usual = [norm.momentum for norm in norms]
    stack.template.train()
    feed.begin_epoch(epoch)
    with torch.no_grad():
        for number in range(min(batches, feed.steps)):
            for norm in norms:
                norm.momentum = 1.0 / (number + 1)
            images, _ = feed.take()
            stack(images.index_select(0, which))
    for norm, momentum in zip(norms, usual, strict=True):
        norm.momentum = momentum
    for name, buffer in stack.buffers.items():
        rows = chosen.view(-1, *[1] * (buffer.dim() - 1))
        buffer.copy_(torch.where(rows, buffer, before[name]))
