"""Criteo lines for the example's tests."""

NUM_INTS, NUM_CATS = 13, 26


def line(label=0, *, ints=(), cats=()):
    """A row's text, blank where nothing is given."""
    ints = [*ints, *[""] * (NUM_INTS - len(ints))]
    cats = [*cats, *[""] * (NUM_CATS - len(cats))]
    return "\t".join(str(value) for value in [label, *ints, *cats])


def write(path, lines, *, end="\n"):
    path.write_bytes("".join(text + end for text in lines).encode())
    return path


def numbered(num_rows, *, first=0):
    """Rows whose first id is their place, with both labels in every split."""
    return [line(i % 2, cats=[f"{i:x}"]) for i in range(first, first + num_rows)]


# What is wrong with a line, and how it is said.
FAULTS = [
    ("0\t1\t2", "must have 40 tab-separated fields, got 3"),
    ("", "must have 40 tab-separated fields, got 1"),
    (line() + "\t", "must have 40 tab-separated fields, got 41"),
    (line(2), "the label must be 0 or 1, got b'2'"),
    (line(""), "the label must be 0 or 1, got b''"),
    (line("01"), "the label must be 0 or 1, got b'01'"),
    (line("/"), "the label must be 0 or 1, got b'/'"),
    (line(ints=[1, "1.5"]), "int_1 must be an integer of at most 18 digits, got b'1.5'"),
    (line(ints=["1_0"]), "int_0 must be an integer of at most 18 digits, got b'1_0'"),
    (line(ints=["-"]), "int_0 must be an integer of at most 18 digits, got b'-'"),
    (line(ints=["", "--1"]), "int_1 must be an integer of at most 18 digits, got b'--1'"),
    (line(ints=["1" * 9 + "-"]), "int_0 must be an integer of at most 18 digits"),
    (line(ints=["a" + "1" * 9]), "int_0 must be an integer of at most 18 digits"),
    (line(ints=[10**18]), "int_0 must be an integer of at most 18 digits"),
    (line(cats=["", "xyz"]), "cat_1 must be at most 15 hexadecimal digits, got b'xyz'"),
    (line(cats=["-1"]), "cat_0 must be at most 15 hexadecimal digits, got b'-1'"),
    (line(cats=["g" + "1" * 9]), "cat_0 must be at most 15 hexadecimal digits"),
    (line(cats=["0" * 16]), "cat_0 must be at most 15 hexadecimal digits"),
]
FAULTS += [
    (line(cats=[character]), "cat_0 must be at most 15 hexadecimal digits")
    for character in "/:@GZ`g{\x00 "
]
FAULTS += [
    (line(ints=[f"1{character}"]), "int_0 must be an integer of at most 18 digits")
    for character in "/:;?pA \x00"
]
