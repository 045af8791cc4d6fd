"""The training loop: steps between validations and checkpoints, and the rates and sums of both."""

import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from blocks import Split
from checkpoints import Progress
from data import CriteoDataset
from flags import Flags
from log import Log
from profiling import TimedBatches
from report import Quality, measure
from schedule import Schedule
from torchrec.datasets.utils import Batch
from torchrec.distributed import TrainPipelineSparseDist
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer

_SCORES = ("auroc", "logloss", "normalized_entropy", "base_rate")
_CHECK_STEPS = 50  # the loss is looked at over all ranks this often


class RowsError(Exception):
    """Rows that cannot be read, or what they hold; its text names the file."""


@dataclass(kw_only=True, slots=True)
class Training:
    """A model in training.

    Args:
        flags: of the run.
        rows: to train and validate on.
        model: sharded.
        optimizer: of all its parameters.
        schedule: of their learning rate.
        progress: how far it is.
        log: where it says so.
        save: writes a checkpoint of the progress; a collective.
        profiler: of torch; its `step()` is called after each step.
    """

    flags: Flags
    rows: CriteoDataset
    model: DistributedModelParallel
    optimizer: CombinedOptimizer
    schedule: Schedule
    progress: Progress
    log: Log
    save: Callable[[], None] | None = None
    profiler: Any = None
    pipeline: TrainPipelineSparseDist = None

    def __post_init__(self) -> None:
        self.pipeline = TrainPipelineSparseDist(self.model, self.optimizer, torch.device("cpu"))


def train(training: Training) -> None:
    """Trains from where the progress is to the last epoch's end.

    Raises:
        FloatingPointError: if the loss is not finite; on every rank.
        RowsError: if rows cannot be read; on the rank that read them.
        CheckpointError: if a checkpoint cannot be written; on every rank.
    """
    while training.progress.epoch < training.flags.epochs:
        _train_epoch(training)


def global_batch_size(flags: Flags) -> int:
    """Returns the rows of a step over all ranks."""
    return flags.batch_size * dist.get_world_size()


def _train_epoch(training: Training) -> None:
    """Trains on the epoch's rows that are left, in parts that end at validations and checkpoints.

    The pipeline, which reads ahead, is empty at a part's end: what is saved there is a whole state.
    """
    flags, progress = training.flags, training.progress
    steps_left = _steps_left(training)
    batches = TimedBatches(_batches(training, "train"))
    with training.log.steps(
        f"epoch {progress.epoch}",
        first=progress.epoch_step,
        total=progress.epoch_step + steps_left,
    ) as bar:
        while steps_left:
            count = min([steps_left, *_steps_to_stops(training)])
            _train_part(training, batches, count, bar)
            steps_left -= count
            if not steps_left:
                break
            if _is_multiple(progress.epoch_step, flags.validation_freq_within_epoch):
                _validate(training)
            if training.save is not None and _is_multiple(progress.step, flags.save_every):
                training.save()
    _validate(training)
    progress.epoch, progress.row, progress.epoch_step = progress.epoch + 1, 0, 0
    if training.save is not None:
        training.save()


def _train_part(training: Training, batches: TimedBatches, count: int, bar: Any) -> None:
    """Takes `count` steps."""
    flags, progress = training.flags, training.progress
    training.model.train()
    sum_losses, num_losses = torch.zeros(()), 0
    part = itertools.islice(batches, count)
    start, waited = time.perf_counter(), batches.seconds
    for i in range(1, count + 1):
        rate = training.schedule.set_rate(training.optimizer, progress.step + 1)
        loss, _, _ = training.pipeline.progress(part)
        sum_losses += loss
        num_losses += 1
        _count_step(training)
        if flags.print_lr and dist.get_rank() == 0:
            print(f"lr: {progress.step} {rate:.6g}", flush=True)
        if i == count or progress.epoch_step % _CHECK_STEPS == 0:
            mean = _checked_mean(training, sum_losses, num_losses)
            seconds = time.perf_counter() - start + progress.seconds
            speed = progress.rows_trained / seconds
            bar.set_postfix_str(f"loss {mean:.4f}, lr {rate:.4g}, {speed:,.0f} samples/s", False)
            training.log.scalars(
                "train",
                {"loss": mean, "learning_rate": rate, "samples_per_second": speed},
                step=progress.step,
            )
            sum_losses.zero_()
            num_losses = 0
        bar.update()
        if training.profiler is not None:
            training.profiler.step()
    progress.seconds += time.perf_counter() - start
    progress.wait_seconds += batches.seconds - waited


def _count_step(training: Training) -> None:
    progress = training.progress
    rows = min(global_batch_size(training.flags), training.rows.num_rows("train") - progress.row)
    progress.row += rows
    progress.rows_trained += rows
    progress.epoch_step += 1
    progress.step += 1


def _checked_mean(training: Training, sum_losses: torch.Tensor, num_losses: int) -> float:
    """Returns the mean loss of all ranks since the last check.

    Raises:
        FloatingPointError: if it is not finite.
    """
    dist.all_reduce(sum_losses)
    mean = sum_losses.item() / (num_losses * dist.get_world_size())
    if not math.isfinite(mean):
        progress = training.progress
        raise FloatingPointError(
            f"loss must be finite, got {mean} by step {progress.epoch_step} of epoch "
            f"{progress.epoch}: try a smaller --learning_rate than {training.flags.learning_rate}"
        )
    return mean


def _validate(training: Training) -> None:
    """Measures the validation rows, if there are any, and notes the result."""
    flags, progress = training.flags, training.progress
    quality = evaluate(training, "val", limit=flags.limit_val_batches)
    if quality is None:
        return
    speed = progress.rows_trained / progress.seconds
    where = f"epoch {progress.epoch}, step {progress.step}, {speed:,.0f} samples/s"
    training.log.line(f"{where}: validation {quality}")
    scores = {name: getattr(quality, name) for name in _SCORES}
    training.log.scalars("validation", scores, step=progress.step)
    progress.validations.append({"epoch": progress.epoch, "step": progress.step, **scores})


@torch.no_grad()
def evaluate(training: Training, split: Split, *, limit: int | None) -> Quality | None:
    """Returns the quality of the predictions for the split's rows, None if it has none.

    Args:
        training: the model and its rows.
        split: which rows.
        limit: batches of a rank, fewer than all.

    Raises:
        FloatingPointError: if their logloss is not finite; on every rank.
    """
    training.model.eval()
    batch_size, world_size = training.flags.test_batch_size, dist.get_world_size()
    num_rows = training.rows.num_rows(split)
    num_steps = math.ceil(num_rows / (batch_size * world_size))
    if limit is not None and limit < num_steps:
        num_steps = limit
        num_rows = limit * batch_size * world_size
    if not num_steps:
        return None
    batches = itertools.islice(_batches(training, split), num_steps)
    outputs = []
    with training.log.steps(split, total=num_steps) as bar:
        for _ in range(num_steps):
            _, logits, labels = training.pipeline.progress(batches)
            outputs.append(torch.stack([logits, labels.float()]))
            bar.update()
    local = torch.cat(outputs, dim=1)  # [2, rows of a rank]
    parts = [torch.empty_like(local) for _ in range(world_size)] if dist.get_rank() == 0 else None
    dist.gather(local, parts)
    quality: list[Quality | None] = [None]
    if parts is not None:
        # Rows went to the ranks in turn, and a rank with a row less has its last one twice.
        logits, labels = torch.stack(parts, dim=2).flatten(1)[:, :num_rows]
        quality = [measure(logits, labels.long())]
    dist.broadcast_object_list(quality)
    measured = quality[0]
    assert measured is not None
    if not math.isfinite(measured.logloss):
        raise FloatingPointError(
            f"logloss of the {split} rows must be finite, got {measured.logloss}: their values may "
            "be beyond what the model can take"
        )
    return measured


def _batches(training: Training, split: Split) -> Iterator[Batch]:
    """Yields this rank's batches of a split, of the training rows those that are left.

    Raises:
        RowsError: for rows that cannot be read.
    """
    flags = training.flags
    try:
        yield from training.rows.batches(
            split,
            batch_size=flags.batch_size if split == "train" else flags.test_batch_size,
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            start_row=training.progress.row if split == "train" else 0,
        )
    except (ValueError, OSError) as error:
        raise RowsError(str(error)) from error


def _steps_left(training: Training) -> int:
    """Returns the steps to the epoch's end."""
    flags, progress = training.flags, training.progress
    steps = (training.rows.num_rows("train") - progress.row) / global_batch_size(flags)
    steps = math.floor(steps) if flags.drop_last_training_batch else math.ceil(steps)
    if flags.limit_train_batches is not None:
        steps = min(steps, flags.limit_train_batches - progress.epoch_step)
    return max(0, steps)


def _steps_to_stops(training: Training) -> Iterator[int]:
    """Yields the steps to the next validation within the epoch and to the next checkpoint."""
    flags, progress = training.flags, training.progress
    for every, step in (
        (flags.validation_freq_within_epoch, progress.epoch_step),
        (flags.save_every if training.save is not None else None, progress.step),
    ):
        if every is not None:
            yield every - step % every


def _is_multiple(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0
