"""Criteo click logs as published: tab-separated lines, parsed many at once.

A line is a label, 13 integers and 26 hexadecimal ids, blank where missing. A field of up to eight
characters is one 64-bit word, and all words of a column are decoded together: several times as fast
as a loop over lines, and twice as fast as polars, which reads ids as text first.
"""

import re
from dataclasses import dataclass

import numpy as np
from blocks import CAT_NAMES, INT_NAMES, NUM_CATS, NUM_INTS, Block, dense_of
from numpy.typing import NDArray

MAX_HEX_DIGITS = 15  # always fit int64
_MAX_DIGITS = 18
_NUM_FIELDS = 1 + NUM_INTS + NUM_CATS
_INTEGER = re.compile(rb"(?:-?[0-9]{1,%d})?" % _MAX_DIGITS)

_PAD = 8  # bytes before the text, so that a word may end at any field
_TAB, _NEWLINE, _RETURN, _MINUS = b"\t\n\r-"


def _bytes(byte: int) -> np.uint64:
    """Returns a word of eight equal bytes."""
    return np.uint64(byte * 0x0101010101010101)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """What is wrong with a line."""

    line: int  # in the text, from 0
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """The well-formed lines of a text, and what is wrong with the others."""

    labels: NDArray[np.int64]  # [N]
    ints: NDArray[np.int64]  # [13, N]
    ids: NDArray[np.int64]  # [26, N]
    faults: list[Fault]

    def block(self) -> Block:
        """Returns the rows as a model reads them."""
        return Block(
            labels=self.labels, dense=np.ascontiguousarray(dense_of(self.ints).T), ids=self.ids
        )


def parse(text: bytes, *, lines: slice = slice(None), max_hex_digits: int = MAX_HEX_DIGITS) -> Rows:
    """Parses whole lines.

    Args:
        text: lines, each ending in a newline.
        lines: which of them to parse; lines without 40 fields are faults wherever they are.
        max_hex_digits: of an id.

    Returns:
        The rows; a missing integer or id is 0.
    """
    padded = bytes(_PAD) + text
    characters = np.frombuffer(padded, np.uint8)
    ends, uneven = _field_ends(characters)
    numbers = np.arange(ends.shape[1] + len(uneven))
    numbers = np.delete(numbers, uneven)[lines] if len(uneven) else numbers[lines]
    starts = np.empty_like(ends)
    starts[1:] = ends[:-1] + 1
    starts[0, :] = _line_starts(characters, uneven)
    starts, ends = starts[:, lines], ends[:, lines].copy()
    if b"\r" in text:
        ends[-1] -= characters[ends[-1] - 1] == _RETURN
    words = np.ndarray((len(padded) - 7,), "<u8", buffer=padded, strides=(1,))
    labels = characters[starts[0]].astype(np.int64) - ord("0")
    bad = (ends[0] - starts[0] != 1) | (labels >> 1 != 0)
    cats = slice(1 + NUM_INTS, None)
    ids, is_bad = _hexadecimal(words, starts[cats], ends[cats], max_digits=max_hex_digits)
    bad |= is_bad.any(axis=0)
    ints = slice(1, 1 + NUM_INTS)
    values, is_bad = _decimal(words, characters, starts[ints], ends[ints])
    bad |= is_bad.any(axis=0)
    faults = []
    if len(uneven) or bad.any():
        all_lines = text.split(b"\n")
        faults = [
            Fault(line=n, message=fault_of(all_lines[n], max_hex_digits=max_hex_digits))
            for n in sorted([*uneven.tolist(), *numbers[bad].tolist()])
        ]
        labels, values, ids = labels[~bad], values[:, ~bad], ids[:, ~bad]
    return Rows(labels=labels, ints=values, ids=ids, faults=faults)


def fault_of(line: bytes, *, max_hex_digits: int = MAX_HEX_DIGITS) -> str:
    """Says what is wrong with a malformed line."""
    fields = line.removesuffix(b"\r").split(b"\t")
    if len(fields) != _NUM_FIELDS:
        return f"must have {_NUM_FIELDS} tab-separated fields, got {len(fields)}"
    if fields[0] not in {b"0", b"1"}:
        return f"the label must be 0 or 1, got {fields[0]!r}"
    for name, field in zip(INT_NAMES, fields[1:], strict=False):
        if _INTEGER.fullmatch(field) is None:
            return f"{name} must be an integer of at most {_MAX_DIGITS} digits, got {field!r}"
    for name, field in zip(CAT_NAMES, fields[1 + NUM_INTS :], strict=True):
        if re.fullmatch(rb"[0-9a-fA-F]{0,%d}" % max_hex_digits, field) is None:
            return f"{name} must be at most {max_hex_digits} hexadecimal digits, got {field!r}"
    raise AssertionError(f"no fault in {line!r}")


def _field_ends(
    characters: NDArray[np.uint8],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns where fields end, [40, N], and which lines have another number of fields."""
    separators = np.flatnonzero((characters == _TAB) | (characters == _NEWLINE))
    is_end = characters[separators] == _NEWLINE
    last = np.flatnonzero(is_end)  # [lines]
    counts = np.diff(last, prepend=-1)
    uneven = np.flatnonzero(counts != _NUM_FIELDS)
    if len(uneven):
        separators = separators[np.repeat(counts == _NUM_FIELDS, counts)]
    ends = separators.reshape(-1, _NUM_FIELDS).T
    return np.ascontiguousarray(ends), uneven


def _line_starts(characters: NDArray[np.uint8], uneven: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns where the lines with 40 fields start."""
    starts = np.empty_like(newlines := np.flatnonzero(characters == _NEWLINE))
    starts[1:] = newlines[:-1] + 1
    starts[:1] = _PAD
    return np.delete(starts, uneven) if len(uneven) else starts


def _last_eight(
    words: NDArray[np.uint64], starts: NDArray[np.int64], ends: NDArray[np.int64]
) -> NDArray[np.uint64]:
    """Returns each field's last eight characters, filled up with '0' in front."""
    blank = np.maximum(8 - (ends - starts), 0).astype(np.uint64) * np.uint64(8)
    found = words[ends - 8]  # little endian: the first character is the lowest byte
    found >>= blank
    found <<= blank
    found |= _bytes(0x30) >> (np.uint64(64) - blank)
    return found


def _hexadecimal(
    words: NDArray[np.uint64],
    starts: NDArray[np.int64],
    ends: NDArray[np.int64],
    *,
    max_digits: int,
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Returns the fields' values, and which are none."""
    word = _last_eight(words, starts, ends)
    letter = (word >> np.uint64(6)) & _bytes(1)
    nibble = word & _bytes(0x0F)
    upper = word & _bytes(0xF0) & ~(letter << np.uint64(5))
    bad = upper ^ (_bytes(0x30) + (letter << np.uint64(4)))  # 0x3. digits, 0x4. or 0x6. letters
    # Digits are 0 to 9 and letters 1 to 6: a carry into bit 4 says otherwise, and none from 0 - 1.
    bad |= (nibble + _bytes(6) + letter * np.uint64(3)) & _bytes(0x10)
    bad |= ~(nibble + _bytes(0x0F)) & (letter << np.uint64(4))
    nibble += letter * np.uint64(9)
    value = ((nibble << np.uint64(4)) | (nibble >> np.uint64(8))) & np.uint64(0x00FF00FF00FF00FF)
    value = ((value << np.uint64(8)) | (value >> np.uint64(16))) & np.uint64(0x0000FFFF0000FFFF)
    value = ((value << np.uint64(16)) | (value >> np.uint64(32))) & np.uint64(0xFFFFFFFF)
    values, is_bad = value.astype(np.int64), bad != 0
    lengths = ends - starts
    if (longest := lengths.max(initial=0)) > max_digits:
        is_bad |= lengths > max_digits
    if longest > 8:
        longer = np.nonzero((lengths > 8) & ~is_bad)
        high, is_high_bad = _hexadecimal(
            words, starts[longer], ends[longer] - 8, max_digits=max_digits - 8
        )
        values[longer] += high << 32
        is_bad[longer] |= is_high_bad
    return values, is_bad


def _decimal(
    words: NDArray[np.uint64],
    characters: NDArray[np.uint8],
    starts: NDArray[np.int64],
    ends: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Returns the fields' values, and which are none."""
    is_negative = characters[starts] == _MINUS  # where a field is blank, what follows is no minus
    starts = starts + is_negative
    values, is_bad = _digits(words, starts, ends)
    is_bad |= (ends - starts > _MAX_DIGITS) | (is_negative & (ends == starts))
    return np.where(is_negative, -values, values), is_bad


def _digits(
    words: NDArray[np.uint64], starts: NDArray[np.int64], ends: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    word = _last_eight(words, starts, ends)
    bad = ((word & _bytes(0xF0)) ^ _bytes(0x30)) | (
        ((word & _bytes(0x0F)) + _bytes(6)) & _bytes(0x10)
    )
    value = word & _bytes(0x0F)
    value = (value * np.uint64(10) + (value >> np.uint64(8))) & np.uint64(0x00FF00FF00FF00FF)
    value = (value * np.uint64(100) + (value >> np.uint64(16))) & np.uint64(0x0000FFFF0000FFFF)
    value = (value * np.uint64(10_000) + (value >> np.uint64(32))) & np.uint64(0xFFFFFFFF)
    values, is_bad = value.astype(np.int64), bad != 0
    lengths = ends - starts
    if lengths.max(initial=0) > 8:
        longer = np.nonzero((lengths > 8) & (lengths <= _MAX_DIGITS))
        high, is_high_bad = _digits(words, starts[longer], ends[longer] - 8)
        values[longer] += high * 100_000_000
        is_bad[longer] |= is_high_bad
    return values, is_bad
