"""A run by itself, in double precision: an optimizer of torch, the Sparsifier and, with `distil`, a teacher."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from gossamer import Sparsifier
from gossamer.lab.data import Batches
from gossamer.lab.data.sets import ImageSet
from gossamer.lab.training.optimise import learning_rate
from gossamer.lab.training.run import Run
from gossamer.methods import METHODS
from gossamer.methods.lottery import rewound
from gossamer.schedule import make_plan


def train_alone(run: Run, images: ImageSet, make_network: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(run.seed)
    network = make_network().double().train()
    batches = Batches.training(images, run.batch_size, seed=run.seed, dtype=torch.float64)
    per_epoch = len(batches)
    total = run.epochs * per_epoch
    optimizer: torch.optim.Optimizer
    if run.optimizer in ("adam", "adamw"):
        kind = torch.optim.Adam if run.optimizer == "adam" else torch.optim.AdamW
        optimizer = kind(network.parameters(), lr=1.0, weight_decay=run.weight_decay)
    else:
        optimizer = torch.optim.SGD(network.parameters(), lr=1.0, momentum=run.momentum, weight_decay=run.weight_decay)

    def rate(step: int) -> float:
        return learning_rate(run, plan, step, total_steps=total, steps_per_epoch=per_epoch)

    def again(plan: Any, step: int) -> float:
        return rewound(plan, step, shared=rate, peak=run.lr)

    rewinds = METHODS[run.method].rewinds
    sparsifier: Sparsifier | None = None
    if run.method != "dense":
        sparsifier = Sparsifier(
            network,
            optimizer,
            method=run.method,
            sparsity=run.sparsity,
            decay=run.decay,
            leave_at=run.leave_at,
            pattern=run.pattern,
            total_steps=total,
            steps_per_epoch=per_epoch,
            preset=run.preset,
            seed=run.seed,
            learning_rate=again if rewinds else None,
            **dict[str, Any](run.settings),
        )
    phases = run.phases
    durations = {"warmup": phases.warmup, "sparsify": phases.sparsify, "stabilise": phases.stabilise}
    plan = make_plan(total, steps_per_epoch=per_epoch, **durations) if sparsifier is None else sparsifier.plan
    teacher = None
    for step in range(total):
        if step % per_epoch == 0:
            epoch = iter(batches)
        if run.distil and step == plan.warmup:
            teacher = copy.deepcopy(network).eval()
        pixels, labels = next(epoch)
        if sparsifier is not None:
            plan = sparsifier.plan
        optimizer.param_groups[0]["lr"] = rate(step)
        left = 1.0 - (run.sparsity or 0.0) if step >= plan.warmup else 1.0
        optimizer.param_groups[0]["weight_decay"] = run.weight_decay * left**run.weight_decay_power
        optimizer.zero_grad()
        logits = network(pixels)
        loss = F.cross_entropy(logits, labels)
        if teacher is not None:
            with torch.no_grad():
                answer = teacher(pixels)
            soft = [F.log_softmax(each / run.temperature, 1) for each in (logits, answer)]
            divergence = F.kl_div(*soft, log_target=True, reduction="batchmean")
            loss = (1 - run.distil) * loss + run.distil * run.temperature**2 * divergence
        loss.backward()
        if run.clip is not None:
            nn.utils.clip_grad_norm_(network.parameters(), run.clip)
        optimizer.step()
        if (step + 1) % per_epoch == 0:
            assert next(epoch, None) is None
    if sparsifier is not None:
        sparsifier.finish()
    return network
