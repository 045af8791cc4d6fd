"""Where a step's time goes: the wait for rows, and torch.profiler's table and trace."""

import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, schedule
from torchrec.datasets.utils import Batch

PROFILED_STEPS = 10
_SKIPPED_STEPS = 5  # of which the last two warm the profiler up
_WARMUP_STEPS = 2
_ROWS_OF_TABLE = 15


class TimedBatches:
    """Counts the seconds for which whoever takes the batches waits for them.

    Args:
        batches: to take.
    """

    def __init__(self, batches: Iterator[Batch]) -> None:
        self._batches = batches
        self.seconds = 0.0

    def __iter__(self) -> "TimedBatches":
        return self

    def __next__(self) -> Batch:
        start = time.perf_counter()
        try:
            return next(self._batches)
        finally:
            self.seconds += time.perf_counter() - start


@contextlib.contextmanager
def profiled(path: Path | None) -> Iterator[Any]:
    """Gives a profiler whose `step()` ends a step.

    The steps 6 to 15 are profiled, on every rank; rank 0 prints the table and writes the trace.

    Args:
        path: of the trace; None profiles nothing, and gives None.
    """
    if path is None:
        yield None
        return

    def on_trace_ready(found: profile) -> None:
        if dist.get_rank() == 0:
            path.unlink(missing_ok=True)
            found.export_chrome_trace(str(path))
            if not path.exists():  # which the profiler only logs
                sys.stderr.write(f"warning: {path} cannot be written\n")
            table = found.key_averages().table(
                sort_by="self_cpu_time_total", row_limit=_ROWS_OF_TABLE, max_name_column_width=60
            )
            print(table, flush=True)

    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(
            skip_first=_SKIPPED_STEPS - _WARMUP_STEPS,
            wait=0,
            warmup=_WARMUP_STEPS,
            active=PROFILED_STEPS,
            repeat=1,
        ),
        on_trace_ready=on_trace_ready,
    ) as running:
        yield running
