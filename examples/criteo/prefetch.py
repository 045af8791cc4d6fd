"""Makes items ahead in a thread, so that who takes them seldom waits."""

import queue
import threading
from collections.abc import Iterator
from typing import TypeVar

T = TypeVar("T")

_WAKE_SECONDS = 0.1  # how often a full queue looks whether anybody still reads


def prefetched(items: Iterator[T], *, depth: int) -> Iterator[T]:
    """Yields `items`, of which a thread makes up to `depth` ahead; raises what it raised.

    The thread ends with the iterator: exhausted, closed or collected.
    """
    ready: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue(maxsize=depth)
    is_over = threading.Event()
    thread = threading.Thread(target=_fill, args=(items, ready, is_over), daemon=True)
    thread.start()
    try:
        while True:
            item, error = ready.get()
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            yield item
    finally:
        is_over.set()
        thread.join()


def _fill(items: Iterator[T], ready: queue.Queue, is_over: threading.Event) -> None:
    while not is_over.is_set():
        try:
            entry = (next(items), None)
        except BaseException as error:  # raised again where the item was wanted
            entry = (None, error)
        while not is_over.is_set():
            try:
                ready.put(entry, timeout=_WAKE_SECONDS)
                break
            except queue.Full:
                continue
        if entry[1] is not None:
            return
