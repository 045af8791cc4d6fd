import threading
import time

import pytest
from prefetch import prefetched


def test_items_come_in_order():
    assert list(prefetched(iter(range(100)), depth=3)) == list(range(100))


def test_an_error_is_raised_where_its_item_was_wanted():
    def items():
        yield 1
        raise ValueError("row 2")

    found = prefetched(items(), depth=4)
    assert next(found) == 1
    with pytest.raises(ValueError, match="row 2"):
        next(found)


def test_items_are_made_ahead_but_no_more_than_the_depth():
    made = []

    def items():
        for i in range(100):
            made.append(i)
            yield i

    found = prefetched(items(), depth=4)
    next(found)
    deadline = time.monotonic() + 10
    while len(made) < 6 and time.monotonic() < deadline:  # one taken, four ready, one to be put
        time.sleep(0.01)
    time.sleep(0.05)
    assert len(made) == 6
    found.close()


def test_the_thread_ends_with_the_iterator():
    before = threading.active_count()
    found = prefetched(iter(range(100)), depth=2)
    next(found)
    assert threading.active_count() == before + 1
    found.close()
    assert threading.active_count() == before
