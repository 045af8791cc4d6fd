"""What reading Criteo rows takes: rate and memory of prepare.py, and how fast a rank reads rows.

    prepare   prepare.py on `--rows` made rows whose ids reach every row of Terabyte's 26 tables as
              soon as there are 10 million of them: megabytes a second of processor time, memory
    read      rows a second of one rank, by form of the rows and batch size

    OMP_NUM_THREADS=1 python benchmarks/criteo_rows.py prepare --rows 10000000 --folder FOLDER

FOLDER takes 270 bytes a row of text, 270 bytes a row of what prepare.py makes, and for a while 210
more; they are deleted at the end.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

CRITEO = Path(__file__).parents[1] / "examples" / "criteo"
sys.path.insert(0, str(CRITEO))

from data import TERABYTE_NUM_EMBEDDINGS, made_dataset, open_dataset  # noqa: E402
from made_rows import MadeRows, write_made_rows  # noqa: E402

_SCATTER = 0x9E3779B1  # odd, so a bijection of 32-bit ids
_CHUNK_ROWS = 8192
_READ_ROWS = 200_000


def write_covering(path: Path, num_rows: int) -> None:
    """Writes rows of which row i has id i modulo each table's rows, spread over 32 bits."""
    made = MadeRows(
        num_rows=_CHUNK_ROWS, num_embeddings=TERABYTE_NUM_EMBEDDINGS, signal_columns=[0], seed=0
    )
    lines = b"".join(made.lines()).splitlines()
    heads = ["\t".join(line.decode().split("\t")[:14]) + "\t" for line in lines]
    sizes = np.array(TERABYTE_NUM_EMBEDDINGS)
    with path.open("w") as file:
        for first in range(0, num_rows, _CHUNK_ROWS):
            rows = np.arange(first, min(first + _CHUNK_ROWS, num_rows))
            words = (rows[:, None] % sizes * _SCATTER % 2**32).astype(">u4")  # [N, 26]
            text = words.tobytes().hex("\t", 4)  # 9 characters an id, the last one's tab missing
            width = 9 * len(sizes)
            file.writelines(
                head + text[i * width : (i + 1) * width - 1] + "\n"
                for i, head in zip(range(len(rows)), heads, strict=False)
            )


def prepare(folder: Path, num_rows: int) -> Iterator[str]:
    """Runs prepare.py and yields what it printed."""
    text = folder / "rows.tsv"
    write_covering(text, num_rows)
    yield f"{text.stat().st_size / 1e6:.0f} MB of text, {num_rows} rows"
    done = subprocess.run(
        [sys.executable, CRITEO / "prepare.py", "--input", text, "--output", folder / "npy"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    first, rate, sizes = done.stdout.splitlines()
    num_ids = sum(map(int, re.findall(r"\d+", sizes))) - 2 * len(TERABYTE_NUM_EMBEDDINGS)
    yield from (first, rate, f"{num_ids} ids in 26 vocabularies")


def read(folder: Path, num_rows: int) -> Iterator[str]:
    """Yields the rows a second that one rank reads of each form."""
    sizes = TERABYTE_NUM_EMBEDDINGS
    num_rows = min(num_rows, _READ_ROWS)
    made = made_dataset(num_rows, num_embeddings=sizes, signal_columns=[0, 9], seed=0)
    write_made_rows(folder / "rows.tsv", made.source)
    command = [sys.executable, CRITEO / "prepare.py", "--input", folder / "rows.tsv"]
    subprocess.run([*command, "--output", folder / "npy"], check=True, stdout=subprocess.DEVNULL)
    started = time.perf_counter()
    text = open_dataset(folder / "rows.tsv", num_embeddings=sizes)
    rate = (folder / "rows.tsv").stat().st_size / 1e6 / (time.perf_counter() - started)
    yield f"check of a TSV file: {rate:.0f} MB/s"
    npy = open_dataset(folder / "npy", num_embeddings=sizes)
    for name, rows in (("TSV", text), ("npy", npy), ("made", made)):
        for batch_size in (64, 2048):
            started = time.perf_counter()
            for _ in rows.batches("train", batch_size=batch_size):
                pass
            rate = rows.num_rows("train") / (time.perf_counter() - started)
            yield f"{name}, batches of {batch_size}: {rate:,.0f} rows/s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("section", choices=("prepare", "read"))
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--folder", help="where to make a temporary folder")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        for text in {"prepare": prepare, "read": read}[args.section](Path(folder), args.rows):
            print(text, flush=True)


if __name__ == "__main__":
    main()
