"""The paper's Criteo Kaggle model against the uncompressed one, with and without row caches.

`examples/criteo/train.py --config examples/criteo/configs/kaggle.yaml` on two CPU ranks, once with
`--compare_dense` and once with `--tt_cache`, on a Criteo file and on made-up rows. A time is that
of the training steps over the uncompressed model's; bytes are of tables and cached rows.

    export OMP_NUM_THREADS=1
    python benchmarks/criteo.py --data FILE --epochs 4
    python benchmarks/criteo.py --made_rows 2000000 -- --adagrad --learning_rate 0.03

Flags after `--` are train.py's, for every run.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

EXAMPLE = Path(__file__).parents[1] / "examples" / "criteo"


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """A model's figures on some rows."""

    model: str
    compression: float
    auroc: float
    logloss: float
    normalized_entropy: float
    samples_per_second: float
    time_ratio: float  # over the uncompressed model
    hit_rate: float | None
    data_wait_ratio: float
    peak_memory_bytes: int | None


def train(*flags: str, ranks: int, folder: Path) -> dict[str, Any]:
    """Runs the example and returns its metrics."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    config = ["--config", str(EXAMPLE / "configs" / "kaggle.yaml"), "--output_dir", str(folder)]
    script = str(EXAMPLE / "train.py")
    subprocess.run([sys.executable, *launcher, script, *config, *flags], check=True)
    return json.loads((folder / "metrics.json").read_text())


def measure(*flags: str, cache: float, ranks: int) -> list[Line]:
    """Trains the three models on the rows that the flags name."""
    with tempfile.TemporaryDirectory() as folder:
        plain = train(*flags, "--compare_dense", ranks=ranks, folder=Path(folder))
        cached = train(*flags, "--tt_cache", str(cache), ranks=ranks, folder=Path(folder))
    dense = {name.removeprefix("dense_"): value for name, value in plain.items()}
    dense_bytes = plain["dense_embedding_bytes"]
    dense |= {"embedding_bytes": dense_bytes, "dense_embedding_bytes": dense_bytes}
    dense |= {"peak_memory_bytes": None}
    speed = dense["samples_per_second"]
    return [
        _line("uncompressed", dense, dense_speed=speed),
        _line("TT", plain, dense_speed=speed),
        _line(f"TT, {100 * cache:g} % of rows cached", cached, dense_speed=speed),
    ]


def _line(model: str, metrics: dict[str, Any], *, dense_speed: float) -> Line:
    caches = metrics.get("row_caches", {}).values()
    hits, misses = (sum(table[name] for table in caches) for name in ("hits", "misses"))
    num_bytes = metrics["embedding_bytes"] + sum(table["bytes"] for table in caches)
    names = ("auroc", "logloss", "normalized_entropy", "samples_per_second", "data_wait_ratio")
    return Line(
        model=model,
        compression=metrics["dense_embedding_bytes"] / num_bytes,
        time_ratio=dense_speed / metrics["samples_per_second"],
        hit_rate=hits / (hits + misses) if caches else None,
        peak_memory_bytes=metrics["peak_memory_bytes"],
        **{name: metrics[name] for name in names},
    )


def _print(title: str, lines: list[Line]) -> None:
    print(f"\n{title}\n")
    print("| model | smaller | AUROC | logloss | time | hits | samples/s | waits | memory a rank |")
    print("|---|---|---|---|---|---|---|---|---|")
    for line in lines:
        hits = "" if line.hit_rate is None else f"{100 * line.hit_rate:.1f} %"
        memory = "" if line.peak_memory_bytes is None else f"{line.peak_memory_bytes / 1e6:.0f} MB"
        print(
            f"| {line.model} | {line.compression:.1f}x | {line.auroc:.4f} | {line.logloss:.4f} "
            f"| {line.time_ratio:.2f} | {hits} | {line.samples_per_second:,.0f} "
            f"| {100 * line.data_wait_ratio:.1f} % | {memory} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", help="Criteo rows, as of train.py")
    parser.add_argument(
        "--made_rows", type=int, default=0, help="made-up rows to train on, besides"
    )
    parser.add_argument("--epochs", type=int, default=1, help="over --data")
    parser.add_argument("--cache", type=float, default=0.001, help="part of a rank's rows to cache")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json", type=Path, help="where to write the figures, too")
    parser.add_argument("flags", nargs="*", help="of train.py, after --")
    args = parser.parse_args()
    sources = {}
    if args.data is not None:
        sources[f"{args.data}, {args.epochs} epochs"] = (
            *("--data", args.data, "--epochs", str(args.epochs)),
        )
    if args.made_rows:
        sources[f"{args.made_rows:,} made-up rows"] = ("--made_rows", str(args.made_rows))
    if not sources:
        parser.error("--data or --made_rows must be given")
    found = {}
    for title, flags in sources.items():
        found[title] = measure(*flags, *args.flags, cache=args.cache, ranks=args.ranks)
        _print(title, found[title])
    if args.json is not None:
        figures = {title: [asdict(line) for line in lines] for title, lines in found.items()}
        args.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
