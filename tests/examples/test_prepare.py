import gzip
import json
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from criteo_lines import FAULTS, NUM_CATS, line, numbered, write
from data import open_dataset
from made_rows import MadeRows, write_made_rows
from prepare import main

CRITEO = Path(__file__).parents[2] / "examples" / "criteo"
KAGGLE_ROWS = CRITEO.parents[2] / "shared" / "data" / "criteo_kaggle_8k.tsv.gz"
SIZES = tuple(50 + 37 * column for column in range(NUM_CATS))
# Kills itself at the n-th flush to the disk, as kill -9 would; without n counts them.
KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv.pop(1))
limit = int(sys.argv.pop(1))
flush, count = os.fsync, 0
def fsync(fd):
    global count
    count += 1
    if count == limit:
        os.kill(os.getpid(), signal.SIGKILL)
    flush(fd)
os.fsync = fsync
import prepare
prepare.main(sys.argv[1:])
print("flushes", count)
"""


def made(path, *, num_rows=3000, seed=0):
    rows = MadeRows(num_rows=num_rows, num_embeddings=SIZES, signal_columns=[3], seed=seed)
    write_made_rows(path, rows, is_scattered=True)
    return path


def made_days(folder):
    folder.mkdir()
    for i in range(3):
        made(folder / f"day_{i}", num_rows=700 + i, seed=i)
    (folder / "day_1.gz").write_bytes(gzip.compress((folder / "day_1").read_bytes()))
    (folder / "day_1").unlink()
    return folder


def prepared(source, output, *flags):
    main(["--input", str(source), "--output", str(output), *map(str, flags)])
    return output


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def run(limit, *flags):
    return subprocess.run(
        [sys.executable, "-c", KILLED, str(CRITEO), str(limit), *map(str, flags)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def fields(path):
    return [text.split("\t") for text in path.read_text().splitlines()]


def error_of(capsys, *args):
    with pytest.raises(SystemExit) as caught:
        prepared(*args)
    assert caught.value.code == 1
    (text,) = capsys.readouterr().err.splitlines()[-1:]
    assert text.startswith("prepare.py: error: ")
    return text


@pytest.mark.parametrize("is_by_frequency", [False, True])
@pytest.mark.parametrize("threshold", [1, 4])
def test_ids_are_numbered_as_counting_them_says(tmp_path, threshold, is_by_frequency):
    source = made(tmp_path / "rows")
    flags = ["--frequency_threshold", threshold, "--segment_rows", 500]
    flags += ["--frequency_order"] * is_by_frequency
    out = prepared(source, tmp_path / "out", *flags)
    rows = fields(source)
    sparse = np.load(out / "train_sparse.npy")
    sizes = json.loads((out / "prepare.json").read_text())["num_embeddings_per_feature"]
    for column in range(NUM_CATS):
        ids = [int(row[14 + column], 16) for row in rows]
        counts = Counter(ids)
        kept = [i for i in counts if counts[i] >= threshold]
        kept.sort(key=lambda i: (-counts[i], i) if is_by_frequency else i)
        numbers = {i: number for number, i in enumerate(kept, start=2)}
        assert sparse[:, column].tolist() == [numbers.get(i, 1) for i in ids]
        assert sizes[column] == 2 + len(kept)
        known = np.load(out / f"cat_{column}_vocabulary.npy")
        assert dict(known.T.tolist()) == numbers


def test_outputs_have_torchrecs_layout_and_are_read_as_the_text_is(tmp_path):
    source = made(tmp_path / "rows")
    out = prepared(source, tmp_path / "out", "--hash_sizes", ",".join(map(str, SIZES)))
    arrays = [np.load(out / f"train_{kind}.npy") for kind in ("dense", "sparse", "labels")]
    assert [(a.shape, a.dtype) for a in arrays] == [
        ((3000, 13), np.float32),
        ((3000, 26), np.int32),
        ((3000, 1), np.int32),
    ]
    as_text, as_npy = (open_dataset(path, num_embeddings=SIZES) for path in (source, out))
    for split in ("train", "val", "test"):
        for one, other in zip(
            as_text.batches(split, batch_size=64), as_npy.batches(split, batch_size=64), strict=True
        ):
            assert one.labels.equal(other.labels)
            assert one.dense_features.equal(other.dense_features)
            assert one.sparse_features.values().equal(other.sparse_features.values())


def test_a_column_may_be_hashed_beside_vocabularies(tmp_path):
    source = made(tmp_path / "rows")
    out = prepared(source, tmp_path / "out", "--hash_sizes", ",".join(["7"] + ["0"] * 25))
    ids = [int(row[14], 16) % 7 for row in fields(source)]
    sparse = np.load(out / "train_sparse.npy")
    assert sparse[:, 0].tolist() == ids
    assert sparse[:, 1].min() == 2
    assert not (out / "cat_0_vocabulary.npy").exists()
    assert json.loads((out / "prepare.json").read_text())["num_embeddings_per_feature"][0] == 7


def test_days_share_their_vocabularies_plain_or_gzip(tmp_path):
    days = made_days(tmp_path / "days")
    out = prepared(days, tmp_path / "out")
    plain = gzip.decompress((days / "day_1.gz").read_bytes())
    whole = (days / "day_0").read_bytes() + plain + (days / "day_2").read_bytes()
    (tmp_path / "whole").write_bytes(whole)
    one = prepared(tmp_path / "whole", tmp_path / "one")
    for kind in ("dense", "sparse", "labels"):
        parts = [np.load(out / f"day_{i}_{kind}.npy") for i in range(3)]
        assert [len(part) for part in parts] == [700, 701, 702]
        assert np.concatenate(parts).tolist() == np.load(one / f"train_{kind}.npy").tolist()


def test_days_keep_their_numbers(tmp_path):
    (tmp_path / "days").mkdir()
    made(tmp_path / "days" / "day_7.tsv", num_rows=100)
    made(tmp_path / "days" / "day_10", num_rows=101)
    out = prepared(tmp_path / "days", tmp_path / "out")
    report = json.loads((out / "prepare.json").read_text())
    assert report["rows"] == {"day_7": 100, "day_10": 101}
    assert open_dataset(out, num_embeddings=SIZES).num_rows("train") == 100


@pytest.mark.skipif(not KAGGLE_ROWS.exists(), reason=f"{KAGGLE_ROWS} is not there")
def test_real_rows_are_the_same_prepared(tmp_path):
    sizes = (1000,) * NUM_CATS
    out = prepared(KAGGLE_ROWS, tmp_path / "out", "--hash_sizes", 1000)
    as_text, as_npy = (open_dataset(path, num_embeddings=sizes) for path in (KAGGLE_ROWS, out))
    one, other = (next(rows.batches("train", batch_size=6000)) for rows in (as_text, as_npy))
    assert one.labels.equal(other.labels)
    assert one.dense_features.equal(other.dense_features)
    assert one.sparse_features.values().equal(other.sparse_features.values())


def test_segments_of_any_length_make_the_same_bytes(tmp_path):
    source = made(tmp_path / "rows", num_rows=30_000)
    whole = contents(prepared(source, tmp_path / "a"))
    assert contents(prepared(source, tmp_path / "b", "--segment_rows", 1)) == whole


@pytest.mark.slow
@pytest.mark.parametrize("form", ["plain", "gzip", "days"])
def test_u71_a_killed_run_goes_on_and_makes_the_same_bytes(tmp_path, form):
    source = made_days(tmp_path / "days") if form == "days" else made(tmp_path / "rows")
    if form == "plain":
        made(source, num_rows=6000)
    if form == "gzip":
        source.write_bytes(gzip.compress(source.read_bytes()))
    flags = ("--input", source, "--segment_rows", 1, "--frequency_threshold", 2)
    flags = (*flags, "--frequency_order")
    whole = run(0, *flags, "--output", tmp_path / "whole")
    expected = contents(tmp_path / "whole")
    count = int(whole.stdout.split()[-1])
    assert count > 60
    for limit in (1, 2, count // 5, count // 2, count - 29, count - 2, count):
        out = tmp_path / f"out{limit}"
        killed = run(limit, *flags, "--output", out)
        assert killed.returncode == -signal.SIGKILL
        assert not out.exists()
        resumed = run(0, *flags, "--output", out)
        assert resumed.returncode == 0, resumed.stderr
        if limit > 1:
            assert int(resumed.stdout.split()[-1]) < count  # what was done is not done again
        assert contents(out) == expected
        assert not out.with_name(out.name + ".partial").exists()


@pytest.mark.slow
def test_u71_memory_does_not_grow_with_the_rows_and_stays_below_the_formula(tmp_path):
    source = made(tmp_path / "rows", num_rows=25_000)
    text = source.read_bytes()
    peaks = []
    for repeats in (1, 8):
        source.write_bytes(text * repeats)
        out = run(
            0, "--input", source, "--output", tmp_path / f"out{repeats}", "--segment_rows", 4000
        )
        peaks.append(int(re.search(r"(\d+) MB of memory", out.stdout)[1]))
    assert len(text) * 7 > 40e6
    assert peaks[1] < peaks[0] + 15
    # Segments end with a chunk of 2**18 bytes, here of some thousand rows more.
    assert peaks[1] * 1e6 < 150e6 + 500 * 10_000 + 8 * sum(SIZES) + 32 * max(SIZES)


def test_a_full_disk_names_the_file_and_the_run_goes_on_once_there_is_room(
    tmp_path, capsys, limit_files
):
    source, out = made(tmp_path / "rows"), tmp_path / "out"
    once = contents(prepared(source, tmp_path / "once", "--segment_rows", 500))
    limit_files(100_000)
    text = error_of(capsys, source, out, "--segment_rows", 500)
    assert text.endswith(f"File too large: '{out}.partial/train_ids.bin'")
    limit_files(-1)
    capsys.readouterr()
    assert contents(prepared(source, out, "--segment_rows", 500)) == once
    assert "the rest of a killed run in " in capsys.readouterr().out  # no rate of all bytes


def test_bad_lines_are_left_out_shown_and_counted(tmp_path, capsys):
    rows = numbered(100)
    bad = [text for text, _ in FAULTS[:12]]
    source = write(tmp_path / "rows", [*rows[:40], *bad, *rows[40:]])
    out = prepared(source, tmp_path / "out", "--max_bad_lines", 12)
    shown = capsys.readouterr()
    assert "100 rows, 12 bad lines left out" in shown.out
    assert f"left out: {source}, line 41: {FAULTS[0][1]}" in shown.err
    assert shown.err.count(f"left out: {source}, line ") == 10
    assert "further lines are counted" in shown.err
    clean = prepared(write(tmp_path / "clean", rows), tmp_path / "clean_out")
    found, expected = contents(out), contents(clean)
    assert json.loads(found.pop("prepare.json"))["bad_lines"] == 12
    assert json.loads(expected.pop("prepare.json"))["bad_lines"] == 0
    assert found == expected


def test_too_many_bad_lines_are_fatal_and_leave_no_output(tmp_path, capsys):
    source = write(tmp_path / "rows", [*numbered(50), line(3), line(4)])
    text = error_of(capsys, source, tmp_path / "out", "--max_bad_lines", 1)
    assert "--max_bad_lines 1 must not be exceeded, got 2; the last is" in text
    assert f"{source}, line 52: the label must be 0 or 1, got b'4'" in text
    assert not (tmp_path / "out").exists()
    prepared(source, tmp_path / "out", "--max_bad_lines", 2)  # the same folder goes on


def test_an_id_of_more_than_32_bits_is_a_bad_line(tmp_path, capsys):
    source = write(tmp_path / "rows", [line(cats=["1ffffffff"])])
    text = error_of(capsys, source, tmp_path / "out")
    assert "line 1: cat_0 must be at most 8 hexadecimal digits, got b'1ffffffff'" in text


@pytest.mark.parametrize("content", [b"", gzip.compress(b"", mtime=0)])  # the id holds the time
def test_a_file_without_rows_is_refused(tmp_path, capsys, content):
    (tmp_path / "rows").write_bytes(content)
    text = error_of(capsys, tmp_path / "rows", tmp_path / "out")
    assert "rows: must hold Criteo rows, got none" in text


def test_a_damaged_gzip_is_refused(tmp_path, capsys):
    source = made(tmp_path / "rows")
    source.write_bytes(gzip.compress(source.read_bytes())[:-100])
    assert "must be a whole gzip file" in error_of(capsys, source, tmp_path / "out")


def test_a_vocabulary_above_its_memory_is_refused_before_it_is_made(tmp_path, capsys):
    source = made(tmp_path / "rows")
    text = error_of(capsys, source, tmp_path / "out", "--max_vocabulary_gb", 1e-6)
    assert re.search(r"cat_\d+ must have at most \d+ ids, got \d+ or more within", text)
    assert "raise it or --frequency_threshold, or give the column a size in --hash_sizes" in text
    prepared(source, tmp_path / "out")  # the memory is no part of the output: it goes on


def test_other_flags_than_a_killed_or_finished_runs_are_refused(tmp_path, capsys):
    source = made(tmp_path / "rows")
    error_of(capsys, source, tmp_path / "out", "--max_vocabulary_gb", 1e-6)
    text = error_of(capsys, source, tmp_path / "out", "--frequency_threshold", 2)
    assert "out.partial has frequency_threshold 1: give those, or delete it" in text
    out = prepared(source, tmp_path / "out")
    before = contents(out)
    prepared(source, out)
    assert "is there already" in capsys.readouterr().out
    text = error_of(capsys, source, out, "--frequency_order")
    assert f"--output {out} must be new, it holds frequency_order False" in text
    assert contents(out) == before


def test_a_folder_that_is_another_runs_is_refused(tmp_path, capsys):
    source = made(tmp_path / "rows")
    partial = tmp_path / "out.partial"
    partial.mkdir()
    code = (
        "import fcntl, sys; lock = open(sys.argv[1], 'w'); fcntl.flock(lock, fcntl.LOCK_EX); "
        "print(flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(partial / "lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as other:
        other.stdout.readline()
        text = error_of(capsys, source, tmp_path / "out")
        other.stdin.write(b"\n")
    assert "must be one run's, another is at work" in text


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("out.partial/settings.json", "{", "settings.json must be of a run of this script, got"),
        ("out/prepare.json", "{", "prepare.json must be of a run of this script, got"),
        ("out/prepare.json", "[]", "prepare.json must be of a run of this script, got []"),
        ("out/prepare.json", "{}", "out must be new, it holds something else"),
        ("out/prepare.json", '{"settings": 3}', "out must be new, it holds something else"),
    ],
)
def test_damaged_notes_of_a_run_are_refused_in_one_line(tmp_path, capsys, name, content, message):
    path = tmp_path / name
    path.parent.mkdir()
    path.write_text(content)
    assert message in error_of(capsys, made(tmp_path / "rows"), tmp_path / "out")
    assert path.read_text() == content


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--hash_sizes", "1,2"], "--hash_sizes must be one or 26 numbers in [0, 2**31), got 1,2"),
        (["--hash_sizes", "x"], "--hash_sizes must be numbers, got x"),
        (["--frequency_threshold", "0"], "--frequency_threshold must be at least 1, got 0"),
        (["--max_bad_lines", "-1"], "--max_bad_lines must be at least 0, got -1"),
        (["--max_vocabulary_gb", "nan"], "--max_vocabulary_gb must be in (0, 2**32), got nan"),
        (["--max_vocabulary_gb", "inf"], "--max_vocabulary_gb must be in (0, 2**32), got inf"),
        (["--max_vocabulary_gb", "-1"], "--max_vocabulary_gb must be in (0, 2**32), got -1.0"),
    ],
)
def test_flags_that_cannot_be_exit_with_one_line(capsys, flags, message):
    with pytest.raises(SystemExit) as caught:
        prepared("rows", "out", *flags)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
