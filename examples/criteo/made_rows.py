"""Made-up Criteo rows whose labels only the compressed tables can explain, of any number.

A label is Bernoulli and its logit depends on the ids of a few columns that are kept in Tensor-Train
(TT) form, and on nothing else: in each of them an id has an effect. The signal "digits" has it
smooth in the digits by which the table's cores are indexed, plus a part of its own for the hottest
ids: a TT of low rank is its exact form, so it favours TT. The signal "rows" knows nothing of TT:
every id has an effect of its own, a Gaussian drawn by a hash of it.

The other columns and the integers carry no signal, so a model whose TT tables do not learn stays
below an AUROC of 0.6, and the probabilities that the labels were drawn from give the best AUROC
that any model can reach.

Rows are made when they are read, any row on its own, so memory does not grow with their number. As
a script it writes them as TSV:

    python examples/criteo/made_rows.py --rows 1000000 --output made.tsv
"""

import argparse
import functools
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from blocks import NUM_CATS, NUM_INTS, Block, dense_of, split_rows
from files import naming
from numpy.typing import NDArray

from torchrec_tt.tt.factorize import factorize_rows

Signal = Literal["digits", "rows"]

# An id is rows * u**9 for uniform u, so id i has a probability of about i**(1 / 9 - 1). Small ids
# are the frequent ones, as where a vocabulary is numbered by first appearance.
_LOGIT_SCALE = 3.0  # the logit's standard deviation over the rows, about
_LOGIT_BIAS = -1.0
_NUM_HOT_IDS = 20
_HOT_SCALE = 0.3
_MISSING_RATIO = 0.05  # of the integers
_CHUNK_ROWS = 8192
_AUROC_BINS = 1 << 16

# A chunk's streams of random numbers: 0 to 25 are the columns' ids.
_INTS_STREAM, _LABELS_STREAM, _SIGNAL_STREAM = NUM_CATS, NUM_CATS + 1, NUM_CATS + 2

# A bijection of 32-bit ids (odd, so invertible): as Criteo's hashes, they then tell no rank.
_SCATTER = 0x9E3779B1


@dataclass(frozen=True, kw_only=True)
class MadeRows:
    """Rows, the same for the same attributes.

    Attributes:
        num_rows: how many.
        num_embeddings: rows of each categorical column's table; ids are below these.
        signal_columns: the categorical columns that the labels depend on.
        seed: of all random numbers.
        signal: what an id's effect is; see above.
    """

    num_rows: int
    num_embeddings: Sequence[int]
    signal_columns: Sequence[int]
    seed: int
    signal: Signal = "digits"

    def read(self, rows: range) -> Iterator[Block]:
        """See `blocks.Source`."""
        for chunk, part in self._chunks(rows):
            ints, is_missing = self._ints(chunk)
            block = Block(
                labels=self._labels(chunk)[0],
                dense=dense_of(np.where(is_missing, 0, ints)),
                ids=np.stack([self._ids(chunk, column) for column in range(NUM_CATS)]),
            )
            yield block[part]

    def best_auroc(self, rows: range) -> float:
        """Returns the AUROC of the labels' true probabilities, which no model can beat."""
        counts = np.zeros((2, _AUROC_BINS), np.int64)  # labels by their probability
        for chunk, part in self._chunks(rows):
            labels, chances = (values[part] for values in self._labels(chunk))
            places = (chances * _AUROC_BINS).astype(np.int64).clip(max=_AUROC_BINS - 1)
            np.add.at(counts, (labels, places), 1)
        negatives, positives = counts.astype(np.float64)
        below = negatives.cumsum() - negatives / 2
        pairs = negatives.sum() * positives.sum()
        return float((positives * below).sum() / pairs) if pairs else math.nan

    def lines(self, *, is_scattered: bool = False) -> Iterator[bytes]:
        """Yields the rows as TSV, some lines at a time.

        Args:
            is_scattered: whether ids are spread over 32 bits, as Criteo's hashed ids are; a table
                then needs a vocabulary (prepare.py) to learn anything from them.
        """
        for chunk, part in self._chunks(range(self.num_rows)):
            ints, is_missing = (values[part] for values in self._ints(chunk))
            texts = np.where(is_missing, "", ints.astype("U20")).tolist()
            ids = np.stack([self._ids(chunk, column)[part] for column in range(NUM_CATS)], axis=1)
            if is_scattered:
                ids = ids * _SCATTER % 2**32
            words = ids.astype(">u4")  # [N, 26]
            labels = self._labels(chunk)[0][part].tolist()
            yield "".join(
                "\t".join((str(label), *text, row.tobytes().hex("\t", 4))) + "\n"
                for label, text, row in zip(labels, texts, words, strict=True)
            ).encode()

    def _chunks(self, rows: range) -> Iterator[tuple[int, slice]]:
        """Yields chunks and which of their rows are among `rows`."""
        while len(rows):
            chunk = rows.start // _CHUNK_ROWS
            first = chunk * _CHUNK_ROWS
            stop = min(first + _CHUNK_ROWS, rows.stop)
            part = range(rows.start, stop, rows.step)
            yield chunk, slice(part.start - first, stop - first, rows.step)
            rows = rows[len(part) :]

    def _random(self, chunk: int, stream: int) -> np.random.Generator:
        return np.random.Generator(np.random.Philox(key=self.seed, counter=[0, 0, stream, chunk]))

    def _ids(self, chunk: int, column: int) -> NDArray[np.int64]:  # [_CHUNK_ROWS]
        uniform = self._random(chunk, column).random(_CHUNK_ROWS)
        square = uniform * uniform
        eighth = (square * square) ** 2
        rows = self.num_embeddings[column]
        return (rows * (eighth * uniform)).astype(np.int64).clip(max=rows - 1)

    def _ints(self, chunk: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Log-normal counts, a few of them -1, and which are missing; [_CHUNK_ROWS, 13] both."""
        random = self._random(chunk, _INTS_STREAM)
        shape = (_CHUNK_ROWS, NUM_INTS)
        counts = np.exp(1.5 * random.standard_normal(shape)).astype(np.int64) - 1
        return counts, random.random(shape) < _MISSING_RATIO

    def _labels(self, chunk: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """The labels and the probabilities that they were drawn from; [_CHUNK_ROWS] both."""
        total = sum(effect(self._ids(chunk, c)) for c, effect in self._effects.items())
        logits = total * (_LOGIT_SCALE / math.sqrt(len(self._effects))) + _LOGIT_BIAS
        chances = 1 / (1 + np.exp(-logits))
        uniform = self._random(chunk, _LABELS_STREAM).random(_CHUNK_ROWS)
        return (uniform < chances).astype(np.int64), chances

    @functools.cached_property
    def _effects(self) -> dict[int, "_DigitEffect | _RowEffect"]:
        random = self._random(0, _SIGNAL_STREAM)
        effect = {"digits": _DigitEffect, "rows": _RowEffect}[self.signal]
        return {c: effect(self.num_embeddings[c], random) for c in self.signal_columns}


class _DigitEffect:
    """h(id) = sqrt(2 / d) * sum_k cos(2 pi (digit_k / m_k + phase_k)), plus the id's own part."""

    def __init__(self, num_embeddings: int, random: np.random.Generator) -> None:
        self.row_factors = factorize_rows(num_embeddings)
        self.phases = random.random(len(self.row_factors)).tolist()
        self.own = _HOT_SCALE * random.standard_normal(min(_NUM_HOT_IDS, num_embeddings))

    def __call__(self, ids: NDArray[np.int64]) -> NDArray[np.float64]:  # [N] both
        smooth = np.zeros(ids.shape)
        rest = ids
        for m, phase in zip(reversed(self.row_factors), reversed(self.phases), strict=True):
            smooth += np.cos(2 * math.pi * (rest % m / m + phase))
            rest = rest // m
        is_hot = ids < len(self.own)
        own = np.where(is_hot, self.own[ids * is_hot], 0.0)
        return smooth * math.sqrt(2 / len(self.row_factors)) + own


class _RowEffect:
    """h(id) ~ N(0, 1), independent for each id and table, from a hash: nothing is stored."""

    def __init__(self, num_embeddings: int, random: np.random.Generator) -> None:
        self.key = random.integers(1 << 62)

    def __call__(self, ids: NDArray[np.int64]) -> NDArray[np.float64]:  # [N] both
        first = _mixed(2 * ids.astype(np.uint64) + np.uint64(self.key))
        other = _mixed(2 * ids.astype(np.uint64) + np.uint64(self.key + 1))
        radius = np.sqrt(-2 * np.log1p(-first))  # Box and Muller's
        return radius * np.cos(2 * math.pi * other)


def _mixed(keys: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Uniform in [0, 1): splitmix64 of Steele, Lea and Flood, 2014; 53 bits of it."""
    bits = keys * np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ bits >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ bits >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    bits ^= bits >> np.uint64(31)
    return (bits >> np.uint64(11)) * 2.0**-53


def write_made_rows(path: Path, rows: MadeRows, *, is_scattered: bool = False) -> float:
    """Writes TSV and returns the best AUROC that a model can reach on its test rows."""
    with path.open("wb") as file:
        file.writelines(rows.lines(is_scattered=is_scattered))
    return rows.best_auroc(split_rows([rows.num_rows])["test"])


def main(argv: Sequence[str] | None = None) -> None:
    from data import KAGGLE_NUM_EMBEDDINGS, TERABYTE_NUM_EMBEDDINGS  # which imports this file

    parser = argparse.ArgumentParser(description="Write made-up Criteo rows as TSV.")
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--output", type=Path, required=True, help="the TSV file")
    parser.add_argument("--tables", choices=("kaggle", "terabyte"), default="kaggle")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--signal", choices=("digits", "rows"), default="digits")
    parser.add_argument("--scatter", action="store_true", help="spread ids over 32 bits")
    args = parser.parse_args(argv)
    for name, least in (("rows", 1), ("seed", 0)):
        if not least <= getattr(args, name) < 2**63:
            parser.error(f"--{name} must be in [{least}, 2^63), got {getattr(args, name)}")
    sizes = {"kaggle": KAGGLE_NUM_EMBEDDINGS, "terabyte": TERABYTE_NUM_EMBEDDINGS}[args.tables]
    largest = sorted(range(NUM_CATS), key=lambda column: -sizes[column])
    rows = MadeRows(
        num_rows=args.rows,
        num_embeddings=sizes,
        signal_columns=largest[4:7],
        seed=args.seed,
        signal=args.signal,
    )
    try:
        with naming(args.output):
            best = write_made_rows(args.output, rows, is_scattered=args.scatter)
    except OSError as error:
        sys.stderr.write(f"made_rows.py: error: {error}\n")
        sys.exit(1)
    sys.stdout.write(f"{args.output}: {args.rows} rows, best reachable AUROC {best:.4f}\n")


if __name__ == "__main__":
    main()
