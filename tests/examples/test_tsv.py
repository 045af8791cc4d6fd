import random

import numpy as np
import pytest
from criteo_lines import FAULTS, NUM_CATS, NUM_INTS, line
from tsv import fault_of, parse


def parsed(texts, **kwargs):
    return parse("".join(text + "\n" for text in texts).encode("latin1"), **kwargs)


def random_lines(count, *, seed=0):
    draw = random.Random(seed)

    def number(base, max_digits):
        return draw.randrange(base ** draw.randint(1, max_digits))

    def blank_or(text):
        return text if draw.random() < 0.9 else ""

    for _ in range(count):
        ints = [blank_or(draw.choice(["", "", "-"]) + str(number(10, 18))) for _ in range(NUM_INTS)]
        forms = [draw.choice(["{:x}", "{:X}", "{:08x}"]) for _ in range(NUM_CATS)]
        cats = [blank_or(form.format(number(16, 15))) for form in forms]
        yield line(draw.randint(0, 1), ints=ints, cats=cats)


def test_fields_have_the_values_that_python_reads():
    lines = list(random_lines(300))
    rows = parsed(lines)
    fields = [text.split("\t") for text in lines]
    assert rows.faults == []
    assert rows.labels.tolist() == [int(row[0]) for row in fields]
    assert rows.ints.T.tolist() == [[int(v or 0) for v in row[1:14]] for row in fields]
    assert rows.ids.T.tolist() == [[int(v or "0", 16) for v in row[14:]] for row in fields]
    assert (rows.ints.dtype, rows.ids.dtype) == (np.int64, np.int64)


@pytest.mark.parametrize("lines", [slice(1, None, 3), slice(4, 9), slice(0, 0)])
def test_selected_lines_are_those_of_the_whole(lines):
    text = list(random_lines(20))
    whole, part = parsed(text), parsed(text, lines=lines)
    assert part.ids.tolist() == whole.ids[:, lines].tolist()
    assert part.labels.tolist() == whole.labels[lines].tolist()


@pytest.mark.parametrize(("text", "fault"), FAULTS)
def test_a_malformed_line_is_a_fault_and_leaves_the_others(text, fault):
    rows = parsed([line(1, cats=["a"]), text, line(0, cats=["b"])])
    assert [found.line for found in rows.faults] == [1]
    assert fault in rows.faults[0].message
    assert (rows.labels.tolist(), rows.ids[0].tolist()) == ([1, 0], [10, 11])


def test_every_fault_of_a_text_is_found_with_its_line():
    texts = [text for text, _ in FAULTS]
    rows = parsed([line(1), *texts, line(0)])
    assert [found.line for found in rows.faults] == list(range(1, len(FAULTS) + 1))
    assert [found.message for found in rows.faults] == [
        fault_of(text.encode("latin1")) for text in texts
    ]
    assert len(rows.labels) == 2


def test_lines_may_end_as_windows_ends_them():
    rows = parsed([text + "\r" for text in [line(1, cats=["a"] * NUM_CATS), line(0)]])
    assert rows.faults == []
    assert rows.ids[-1].tolist() == [10, 0]


def test_u68_integers_are_finite_whatever_their_sign_and_zero_where_missing():
    dense = parsed([line(ints=[-3, -1, 0, "", 5, 10**18 - 1])]).block().dense
    assert dense.dtype == np.float32
    assert dense[0, :5].tolist() == pytest.approx([0, 0, 0, 0, np.log(6)])
    assert np.isfinite(dense).all()
