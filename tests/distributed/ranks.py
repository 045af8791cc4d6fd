"""Processes that stay up between tests, each a rank of one gloo group.

Importing torchrec takes seconds, so tests share the processes: a test sends a function, every rank
runs it, the results come back in order of rank. Where a rank fails or hangs, all are replaced.
"""

import multiprocessing
import os
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

START_SECONDS = 120
FAILURE_SECONDS = 5  # that the other ranks have where one has failed


class Ranks:
    """`world_size` processes, `local_world_size` to a node; started at the first `run`."""

    def __init__(self, world_size: int, *, local_world_size: int | None = None) -> None:
        self.world_size = world_size
        self.local_world_size = local_world_size or world_size
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def run(self, function: Callable[..., Any], *args: Any, seconds: float = 60) -> list[Any]:
        """Returns `function(rank, *args)` of every rank; a rank's failure fails the test."""
        if not self._processes:
            self._start()
            seconds += START_SECONDS
        for pipe in self._pipes:
            pipe.send((function, args))
        answers = self._answers(seconds)
        failures = [f"rank {r}: {text}" for r, (ok, text) in enumerate(answers) if not ok]
        if failures:
            self.stop()
            raise AssertionError("\n".join(failures))
        return [result for _, result in answers]

    def _answers(self, seconds: float) -> list[tuple[bool, Any]]:
        """Whether each rank succeeded, and its result; the others soon follow one that failed."""
        answers = dict.fromkeys(self._pipes, (False, "no answer"))
        waiting = list(self._pipes)
        deadline = time.monotonic() + seconds
        while waiting and (ready := wait(waiting, deadline - time.monotonic())):
            for pipe in ready:
                answers[pipe] = pipe.recv()
                waiting.remove(pipe)
                if not answers[pipe][0]:
                    deadline = min(deadline, time.monotonic() + FAILURE_SECONDS)
        return list(answers.values())

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._pipes = [], []

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        store = os.path.join(self._folder.name, "store")
        for rank in range(self.world_size):
            pipe, theirs = context.Pipe()
            args = (rank, self.world_size, self.local_world_size, store, theirs)
            process = context.Process(target=_serve, args=args, daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(pipe)


def _serve(rank: int, world_size: int, local_world_size: int, store: str, pipe: Connection) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = str(local_world_size)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    warnings.filterwarnings("error", module="torchrec_tt")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=START_SECONDS),
    )
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:  # the tests are over
            return
        try:
            torch.manual_seed(0)
            pipe.send((True, function(rank, *args)))
        except BaseException:  # CheckpointException is no Exception
            pipe.send((False, traceback.format_exc()))
