"""Turns Criteo TSV into npy files with renumbered ids, in two passes of bounded memory.

    python examples/criteo/prepare.py --input train.txt --output criteo_npy
    python examples/criteo/prepare.py --input DAYS --output criteo_npy --frequency_threshold 3

--input is a file, or a folder with `day_0[.gz]`, `day_1[.gz]`, ... The first pass parses the text,
writes labels and integers, counts ids; the second gives the ids their numbers. Everything is made
in OUTPUT.partial and becomes OUTPUT at the very end. After a kill the same command goes on where
the last segment ended and makes the same bytes. Memory: 150 MB, 500 bytes a row of a segment, 8
bytes an id of all vocabularies and 32 bytes an id of the largest.
"""

import argparse
import fcntl
import json
import os
import re
import resource
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import vocabulary
from blocks import CAT_NAMES, NUM_CATS, NUM_INTS
from day_files import day_files, missing_days
from numpy.typing import NDArray
from progress import move, progress
from segments import NPY_HEADER_BYTES, Folder, Reading, append, npy_header, read_segments

_VOCABULARY_BYTES = 8  # an id's


@dataclass(frozen=True, kw_only=True, slots=True)
class Numbering:
    """How ids get their numbers.

    Attributes:
        hash_sizes: of each column: 0 for a vocabulary; else an id's number is the id modulo it.
        frequency_threshold: of a vocabulary's ids.
        is_by_frequency: whether the most frequent ids get the smallest numbers.
        max_vocabulary_bytes: that all vocabularies may take.
    """

    hash_sizes: list[int]
    frequency_threshold: int
    is_by_frequency: bool
    max_vocabulary_bytes: int


def main(argv: Sequence[str] | None = None) -> None:
    args = _parse_args(argv)
    try:
        run(args)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"prepare.py: error: {error}\n")
        sys.exit(1)


def run(args: argparse.Namespace) -> None:
    """Makes the output, or goes on making it.

    Raises:
        ValueError: for an input or output that cannot be.
        OSError: for what cannot be read or written.
    """
    started = time.monotonic()
    paths = day_files(args.input) if args.input.is_dir() else [args.input]
    prefixes = [path.name.split(".")[0] for path in paths] if args.input.is_dir() else ["train"]
    if missing := missing_days(paths):
        sys.stderr.write(f"warning: {args.input} has a gap, no days {missing}\n")
    if not args.output.name:
        raise ValueError(f"--output must be a folder that is not there yet, got {args.output}")
    settings = _settings(args, paths)
    folder = Folder(path=args.output.with_name(args.output.name + ".partial"))
    if args.output.exists():
        _check_finished(args.output, settings)
        shutil.rmtree(folder.path, ignore_errors=True)  # of a run killed after its last step
        return
    folder.output("").mkdir(parents=True, exist_ok=True)
    with (folder.path / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{folder.path} must be one run's, another is at work") from None
        is_resumed = _is_resumed(folder.path / "settings.json", settings)
        reading = Reading(
            paths=paths,
            prefixes=prefixes,
            segment_rows=args.segment_rows,
            max_bad_lines=args.max_bad_lines,
        )
        if not (counted := folder.path / "counted").exists():
            _first_pass(reading, folder)
            _write_whole(counted, b"")
        numbering = Numbering(
            hash_sizes=args.hash_sizes,
            frequency_threshold=args.frequency_threshold,
            is_by_frequency=args.frequency_order,
            max_vocabulary_bytes=int(args.max_vocabulary_gb * 1e9),
        )
        vocabularies = _vocabularies(folder, numbering)
        _second_pass(folder, prefixes, vocabularies, numbering)
        report = _report(folder, prefixes, vocabularies, numbering)
        text = json.dumps({"settings": settings, **report}, indent=2) + "\n"
        _write_whole(folder.output("prepare.json"), text.encode())
        folder.output("").rename(args.output)
    shutil.rmtree(folder.path)
    read_bytes = None if is_resumed else sum(path.stat().st_size for path in paths)
    _say(report, read_bytes=read_bytes, started=started)


def _first_pass(reading: Reading, folder: Folder) -> None:
    sizes = [path.stat().st_size for path in reading.paths]
    before = np.cumsum([0, *sizes]).tolist()
    with progress("reading", total=before[-1], unit="B") as bar:
        read_segments(
            reading, folder, on_bytes=lambda number, position: move(bar, before[number] + position)
        )
    segments = folder.segments()
    for number, prefix in enumerate(reading.prefixes):
        num_rows = int(segments["num_rows"][segments["file"] == number].sum())
        for kind, dtype, width in (("dense", "<f4", NUM_INTS), ("labels", "<i4", 1)):
            with folder.output(f"{prefix}_{kind}.npy").open("r+b") as file:
                file.write(npy_header(dtype, num_rows=num_rows, width=width))


def _vocabularies(folder: Folder, numbering: Numbering) -> list[NDArray[np.uint32] | None]:
    """Builds the columns' vocabularies, [2, V], or reads those that are built; None if hashed."""
    segments = folder.segments()
    left = numbering.max_vocabulary_bytes // _VOCABULARY_BYTES
    vocabularies: list[NDArray[np.uint32] | None] = []
    for column in range(NUM_CATS):
        if numbering.hash_sizes[column]:
            vocabularies.append(None)
            folder.counts(column).unlink(missing_ok=True)
            continue
        path = folder.output(f"{CAT_NAMES[column]}_vocabulary.npy")
        if not path.exists():
            try:
                built = vocabulary.build(
                    folder.counts(column),
                    segments["num_ids"][:, column].tolist(),
                    frequency_threshold=numbering.frequency_threshold,
                    is_by_frequency=numbering.is_by_frequency,
                    max_ids=left,
                )
            except ValueError as error:
                raise ValueError(
                    f"{CAT_NAMES[column]} {error} within --max_vocabulary_gb "
                    f"{numbering.max_vocabulary_bytes / 1e9:g}: raise it or --frequency_threshold, "
                    f"or give the column a size in --hash_sizes"
                ) from None
            header = npy_header("<u4", num_rows=2, width=built.shape[1])
            _write_whole(path, header + built.tobytes())
        folder.counts(column).unlink(missing_ok=True)
        vocabularies.append(np.load(path))
        left -= vocabularies[-1].shape[1]
    return vocabularies


def _second_pass(
    folder: Folder,
    prefixes: list[str],
    vocabularies: list[NDArray[np.uint32] | None],
    numbering: Numbering,
) -> None:
    segments = folder.segments()
    row_bytes = 4 * NUM_CATS
    bar = progress("numbering", total=int(segments["num_rows"].sum()) * row_bytes, unit="B")
    done = 0
    for number, prefix in enumerate(prefixes):
        lengths = segments["num_rows"][segments["file"] == number].tolist()
        path = folder.output(f"{prefix}_sparse.npy")
        size = path.stat().st_size if path.exists() else 0
        ends = NPY_HEADER_BYTES + np.cumsum([0, *lengths]) * row_bytes
        num_done = int(np.searchsorted(ends, size, side="right")) - 1
        if num_done < 0:
            _write_whole(path, npy_header("<i4", num_rows=sum(lengths), width=NUM_CATS))
            num_done = 0
        elif size > ends[num_done]:
            os.truncate(path, ends[num_done])
        for i in range(num_done, len(lengths)):
            raw = np.fromfile(
                folder.raw_ids(prefix),
                "<u4",
                count=NUM_CATS * lengths[i],
                offset=int(ends[i]) - NPY_HEADER_BYTES,
            ).reshape(NUM_CATS, lengths[i])
            numbers = np.empty((lengths[i], NUM_CATS), np.int32)
            for column, known in enumerate(vocabularies):
                numbers[:, column] = (
                    raw[column] % np.uint32(numbering.hash_sizes[column])
                    if known is None
                    else vocabulary.look_up(known, raw[column])
                )
            append(path, numbers)
            move(bar, done + int(ends[i + 1]) - NPY_HEADER_BYTES)
        done += sum(lengths) * row_bytes
        folder.raw_ids(prefix).unlink(missing_ok=True)
    bar.close()


def _report(
    folder: Folder,
    prefixes: list[str],
    vocabularies: list[NDArray[np.uint32] | None],
    numbering: Numbering,
) -> dict[str, Any]:
    segments = folder.segments()
    return {
        "rows": {
            prefix: int(segments["num_rows"][segments["file"] == number].sum())
            for number, prefix in enumerate(prefixes)
        },
        "bad_lines": int(segments["bad_lines"][-1]),
        "num_embeddings_per_feature": [
            size if known is None else known.shape[1] + vocabulary.FIRST_NUMBER
            for known, size in zip(vocabularies, numbering.hash_sizes, strict=True)
        ],
    }


def _say(report: dict[str, Any], *, read_bytes: int | None, started: float) -> None:
    """Prints what was made, and how fast where one run did it all."""
    seconds = time.monotonic() - started
    usage = resource.getrusage(resource.RUSAGE_SELF)
    cpu_seconds = usage.ru_utime + usage.ru_stime
    sizes = ",".join(map(str, report["num_embeddings_per_feature"]))
    print(f"{sum(report['rows'].values())} rows, {report['bad_lines']} bad lines left out")
    memory = f"{_peak_memory_bytes() / 1e6:.0f} MB of memory"
    if read_bytes is None:
        print(f"the rest of a killed run in {seconds:.1f} s, {memory}")
    else:
        print(
            f"{read_bytes / 1e6:.0f} MB in {seconds:.1f} s, {read_bytes / 1e6 / seconds:.1f} MB/s, "
            f"{read_bytes / 1e6 / cpu_seconds:.1f} MB a second of the processor, {memory}"
        )
    print(f"--num_embeddings_per_feature {sizes}")


def _peak_memory_bytes() -> int:
    """Returns the largest resident memory so far; `ru_maxrss` would count a parent's too."""
    (line,) = re.findall(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    return int(line) * 1024


def _settings(args: argparse.Namespace, paths: list[Path]) -> dict[str, Any]:
    """Returns what decides about the output; not where it lies."""
    return {
        "inputs": [{"name": path.name, "bytes": path.stat().st_size} for path in paths],
        "frequency_threshold": args.frequency_threshold,
        "frequency_order": args.frequency_order,
        "hash_sizes": args.hash_sizes,
    }


def _check_finished(output: Path, settings: dict[str, Any]) -> None:
    report = output / "prepare.json"
    found = _saved(report).get("settings") if report.is_file() else None
    if found != settings:
        raise ValueError(f"--output {output} must be new, it holds {_difference(found, settings)}")
    print(f"{output} is there already, made from the same input with the same flags")


def _is_resumed(path: Path, settings: dict[str, Any]) -> bool:
    """Returns whether a killed run is gone on with; writes the settings, or refuses others."""
    if not path.exists():
        _write_whole(path, json.dumps(settings).encode())
        return False
    if (found := _saved(path)) != settings:
        raise ValueError(
            f"a killed run is gone on with by its own flags only; {path.parent} has "
            f"{_difference(found, settings)}: give those, or delete it"
        )
    return True


def _saved(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} must be of a run of this script, got {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must be of a run of this script, got {content}")
    return content


def _difference(found: Any, settings: dict[str, Any]) -> str:
    if not isinstance(found, dict):
        return "something else"
    return ", ".join(
        f"{key} {found.get(key)}" for key in settings if found.get(key) != settings[key]
    )


def _write_whole(path: Path, data: bytes) -> None:
    """Writes a file that is there with all its bytes or not at all."""
    partial = path.with_name(path.name + ".part")
    partial.unlink(missing_ok=True)
    append(partial, data)
    partial.replace(path)


def _parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Turn Criteo TSV into npy files with renumbered ids.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--input", type=Path, required=True, help="a TSV file or a folder of days, plain or gzip")
    add("--output", type=Path, required=True, help="a folder that is not there yet")
    add("--frequency_threshold", type=int, default=1, help="an id that occurs less often is 1")
    add("--frequency_order", action="store_true", help="number frequent ids first")
    add(
        "--hash_sizes",
        default="0",
        help="one or 26 numbers: take the column's ids modulo it; 0 gives it a vocabulary",
    )
    add("--max_bad_lines", type=int, default=0, help="malformed lines to leave out")
    add("--max_vocabulary_gb", type=float, default=1.0, help="memory of all vocabularies")
    add("--segment_rows", type=int, default=1 << 18, help="rows between points to go on from")
    args = parser.parse_args(argv)
    try:
        sizes = [int(text) for text in args.hash_sizes.split(",")]
    except ValueError:
        parser.error(f"--hash_sizes must be numbers, got {args.hash_sizes}")
    if len(sizes) not in {1, NUM_CATS} or min(sizes) < 0 or max(sizes) >= 2**31:
        parser.error(f"--hash_sizes must be one or 26 numbers in [0, 2**31), got {args.hash_sizes}")
    args.hash_sizes = sizes * NUM_CATS if len(sizes) == 1 else sizes
    for name, least in (("frequency_threshold", 1), ("max_bad_lines", 0), ("segment_rows", 1)):
        if getattr(args, name) < least:
            parser.error(f"--{name} must be at least {least}, got {getattr(args, name)}")
    if not 0 < args.max_vocabulary_gb < 2**32:  # what is above is no memory, and infinity
        parser.error(f"--max_vocabulary_gb must be in (0, 2**32), got {args.max_vocabulary_gb}")
    return args


if __name__ == "__main__":
    main()
