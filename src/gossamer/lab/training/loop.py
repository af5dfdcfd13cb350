"""The training loop. `train` reads from top to bottom: data, model, optimizer, sparsifier, steps, result.

A run can be killed at any moment. The same call resumes from its last checkpoint; on a CPU the result is then the same
bit for bit. The test set is evaluated once, after the last step.
"""

import time
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from gossamer.lab.checkpoint import Checkpoints
from gossamer.lab.data.batches import seed_for
from gossamer.lab.data.folder import advice_on_lost_workers
from gossamer.lab.training import mask_variables, modes, networks, result, snapshot
from gossamer.lab.training.distributed import (
    DistributedContext,
    advice_on_lost_processes,
    exit_at_once_after_an_error,
    fast_algorithms,
    forward_of,
    join,
    shard_,
    synchronise_batch_norm,
    whole_state,
)
from gossamer.lab.training.folder_lock import only_one
from gossamer.lab.training.optimise import (
    learning_rate,
    make_optimizer,
    out_of_reach,
    plan_without_masks,
    set_weight_decay,
    taken_learning_rate,
    weight_decay,
)
from gossamer.lab.training.progress import JsonLines, Observer, Observers, Status
from gossamer.lab.training.run import Run
from gossamer.lab.training.signals import Interrupted, StopSignal
from gossamer.lab.training.snapshot import Parts
from gossamer.lab.training.sparsify import make_sparsifier
from gossamer.lab.training.step import Meter, Step, check_last_step
from gossamer.lab.training.task import make_task, perplexity
from gossamer.lab.training.teacher import make_teacher
from gossamer.schedule import Phase
from gossamer.sparsifier import Sparsifier

# When processes agree on whether to stop or to write a checkpoint: a launcher kills processes that stop too late.
_AGREE_EVERY = 10  # steps, or
_AGREE_AFTER = 2.0  # seconds


@exit_at_once_after_an_error()
@advice_on_lost_workers()
@advice_on_lost_processes()
def train(
    run: Run,
    out: Path | str,
    *,
    observers: Sequence[Observer] = (),
    keep_mask_variables: bool = False,
) -> dict[str, Any]:
    """Train `run`, or resume it, in the folder `out`. Returns the contents of result.json.

    `observers` receive the progress, in addition to the log in that folder. `keep_mask_variables` also writes the mask
    variables and dense weights before the last step in which masks train, for `gossamer frontier`.
    """
    if not isinstance(run, Run):
        raise TypeError(
            f"expected a Run, got {run!r}: Run(model=…), or the run of a recipe, "
            "gossamer.lab.recipes.find('digits').run"
        )
    if out == "":
        raise ValueError("expected a folder for the run, got an empty name: write . for the current folder")
    with ExitStack() as held:
        return _train(run, Path(out), observers, held, keep_mask_variables)


def _train(
    run: Run, folder: Path, observers: Sequence[Observer], held: ExitStack, keep_mask_variables: bool
) -> dict[str, Any]:
    networks.check_options(run)
    context = join(run.device)
    if keep_mask_variables and context.world > 1:
        raise ValueError(f"mask variables can be kept by one process, got {context.world}: train without this option")

    def look() -> dict[str, Any] | None:
        return result.read_result(folder, run) if context.leads else None

    done = context.broadcast(context.main_process_first(look))
    if done is not None:
        return dict(done)
    if run.batch_size < context.world:
        raise ValueError(f"expected a batch_size of at least one sample per process ({context.world})")
    chosen = modes.resolve(run, context)
    task = context.main_process_first(lambda: make_task(chosen, context))
    if run.schedule == "plateau" and not task.has_validation:
        raise ValueError("schedule=plateau needs a validation set: set validation= to hold out some images")
    total, per_epoch = len(task.source) * run.epochs, len(task.source)
    chosen = modes.resolve_compile(chosen, context, total)
    if chosen.compile and run.compile is None:
        held.enter_context(modes.tolerate_compiler())
    for problem in out_of_reach(run, total, per_epoch) if context.leads else ():
        warnings.warn(problem, stacklevel=3)

    torch.manual_seed(run.seed)
    model = context.main_process_first(lambda: networks.create(run, task.num_classes))
    model = networks.to_layout(model, chosen, context.device).train()
    networks.check_shapes(run, model, task.example(), task.num_classes)
    model = synchronise_batch_norm(model, context)
    shard_(model, run, context)
    torch.manual_seed(seed_for(run.seed, context.rank))  # of dropout, which differ between processes

    optimizer = make_optimizer(chosen, model)
    networks.keep_stable(model, optimizer, task.example())
    sparsifier = make_sparsifier(
        run, model, optimizer, total_steps=total, steps_per_epoch=per_epoch, example=task.example()
    )
    forward = forward_of(model, chosen, context)
    if sparsifier is not None:
        held.callback(sparsifier.detach)  # an interrupted run is no mistake to warn of
    plan = plan_without_masks(run, total, per_epoch, leads=context.leads) if sparsifier is None else sparsifier.plan
    teacher = make_teacher(chosen, context, task.requirements(), plan)

    def hold() -> dict[str, Any] | None:
        if context.leads:
            with result.writing(folder):
                folder.mkdir(parents=True, exist_ok=True)
                held.enter_context(only_one(folder))
        return look()  # again: another process may have finished in the meantime

    def sign() -> None:
        if context.leads:
            with result.writing(folder):
                result.write_json(folder / result.RUN, run.to_dict())

    done = context.broadcast(context.main_process_first(hold))
    if done is not None:
        return dict(done)
    checkpoints, parts = Checkpoints(folder), Parts(model, optimizer, sparsifier, task, teacher)
    clock = _Clock(snapshot.restore(checkpoints, run, context, parts), run.checkpoint_minutes)
    context.main_process_first(sign)  # only after a checkpoint of another run would have been refused
    step = task.source.state.epoch * per_epoch + task.source.state.step
    meter = Meter(context, step)
    take_step = Step(chosen, context, task, model, optimizer, sparsifier, forward, meter, teacher)
    held.callback(take_step.close)

    def status(*, lr: float, validation: float | None = None) -> Status:
        loss, right = meter.means()
        return Status(
            step=step,
            total_steps=total,
            epoch=step / per_epoch,
            epochs=run.epochs,
            phase="dense" if sparsifier is None else str(sparsifier.phase),
            lr=lr,
            seconds=clock.seconds(),
            loss=loss,
            metric=task.metric,
            train=perplexity(loss) if task.metric == "perplexity" and loss is not None else right,
            validation=validation,
            sparsity=None if sparsifier is None else sparsifier.sparsity,
            decay=_decay(sparsifier),
        )

    watching_all = Observers([JsonLines(folder), *observers] if context.leads else ())
    with (
        fast_algorithms(context),
        watching_all as watching,
        StopSignal(launched=context.world > 1) as stop,
    ):

        def evaluate(part: str, *, at_the_end: bool = False) -> float:
            def tell(done: int, batches: int) -> None:
                if at_the_end and task.streamed and agreement.is_due() and context.any(stop.asked):
                    stopped = f"stopped in the evaluation after the last step, {done} of {batches} batches done"
                    raise Interrupted(f"{stopped}: run the same command again; {checkpoints.next_time()}")
                doing = f"evaluating {part} {done / batches:.0%}{', then stops' if stop.asked else ''}"
                watching.move(step, clock.seconds(), doing, at_once=done == 0)

            # Rounding differs between GPUs; with one value for all, their learning rates stay equal.
            return float(context.broadcast(task.evaluate(model, part, tell)))

        agreement = _Agreement(context)
        watching.begin(status(lr=run.lr))
        while step < total:
            if task.source.state.step == 0:
                task.begin_epoch()
                if teacher is not None:
                    teacher.begin_epoch()
            for batch in task.source:
                phases = plan if sparsifier is None else sparsifier.plan
                lr = learning_rate(run, phases, step, total_steps=total, steps_per_epoch=per_epoch)
                set_weight_decay(optimizer, weight_decay(run, phases, step))
                lr *= parts.plateau.factor
                if teacher is not None:
                    teacher.before(step, model)
                if keep_mask_variables and sparsifier is not None and mask_variables.are_final_after(sparsifier, step):
                    mask_variables.write(folder, model, sparsifier)
                take_step(batch, lr)
                step += 1
                meter.count(step)

                epoch_over = step % per_epoch == 0
                validation = None
                if epoch_over and task.has_validation and (step // per_epoch) % run.evaluate_every == 0:
                    validation = evaluate("validation")
                    shrinking = sparsifier is not None and sparsifier.phase is Phase.SPARSIFY
                    parts.plateau = parts.plateau.see(run, task.metric, validation, shrinking=shrinking)
                if epoch_over or step % run.log_steps == 0:
                    watching.tell(status(lr=taken_learning_rate(optimizer, lr), validation=validation))
                else:
                    watching.move(step, clock.seconds())

                due = run.checkpoint_steps > 0 and step % run.checkpoint_steps == 0
                stopping = False
                if agreement.is_due():
                    stopping = context.any(stop.asked)
                    due = context.any(due or stopping or clock.checkpoint_is_due())
                if step == total:
                    due = task.streamed  # whose evaluation takes long; the others finish quickly
                if due:
                    meter.check()
                    saved = snapshot.save(checkpoints, run, context, parts, step=step, seconds=clock.seconds())
                    clock.checkpoint_written()
                    if stopping:
                        raise Interrupted(_stop_message(f"stopped after step {step} of {total}", checkpoints, saved))

        meter.check()
        health = None
        if sparsifier is not None:
            sparsifier.finish()
            health = sparsifier.health()
        validation = evaluate("validation", at_the_end=True) if task.has_validation else None
        test = evaluate("test", at_the_end=True)
        watching.move(step, clock.seconds(), at_once=True)
        counted = result.count(run, model, task.example())
        finished = result.make_result(
            run,
            context,
            mode=str(modes.mode_of(chosen)),
            counted=counted,
            metric=task.metric,
            test=test,
            validation=validation,
            seconds=clock.seconds(),
            settled=None if sparsifier is None else sparsifier.resolved_settings or None,
            teacher=None if teacher is None else teacher.description(),
        )
        tensors = whole_state(model)

        def write() -> None:
            if context.leads:
                check_last_step(tensors, test)
                result.write_all(folder, tensors, counted, finished, health)
                checkpoints.clear()

        context.main_process_first(write)  # no process exits and closes its connections while another one writes
        return finished


def _stop_message(stopped: str, checkpoints: Checkpoints, saved: bool) -> str:
    if saved:
        return f"{stopped}; a checkpoint is in {checkpoints.folder}: run the same command again to resume"
    return f"{stopped}, but no checkpoint could be written: run the same command again; {checkpoints.next_time()}"


def _decay(sparsifier: Sparsifier | None) -> float | None:
    if sparsifier is None or not sparsifier.phase.masks_train:
        return None
    trace = sparsifier.health(layers=False).decay
    return trace[-1] if trace else None


class _Agreement:
    """When processes agree on stopping and checkpoints: all at the same step, whatever their clocks show."""

    def __init__(self, context: DistributedContext) -> None:
        self._context, self._steps, self._left, self._last = context, 1, 1, time.monotonic()

    def is_due(self) -> bool:
        """Whether this is a step of agreement; all processes have to call it in every step."""
        if self._context.world == 1:
            return True
        self._left -= 1
        if self._left > 0:
            return False
        now = time.monotonic()
        fit = int(_AGREE_AFTER * self._steps / max(now - self._last, 1e-9))
        fewest = self._context.minimum(torch.tensor(min(_AGREE_EVERY, max(1, fit)), device=self._context.device))
        self._steps = self._left = int(fewest)
        self._last = now
        return True


class _Clock:
    """The seconds of training over all sessions, and the time of the next checkpoint."""

    def __init__(self, seconds_before: float, checkpoint_minutes: float) -> None:
        self._start = time.monotonic() - seconds_before
        self._interval = checkpoint_minutes * 60
        self._last = time.monotonic()

    def seconds(self) -> float:
        return time.monotonic() - self._start

    def checkpoint_is_due(self) -> bool:
        return self._interval > 0 and time.monotonic() - self._last >= self._interval

    def checkpoint_written(self) -> None:
        self._last = time.monotonic()
