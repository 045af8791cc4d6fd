import gzip
from itertools import chain

import numpy as np
import pytest
import torch
from criteo_lines import NUM_CATS, line, numbered, write
from data import KAGGLE_NUM_EMBEDDINGS, TERABYTE_NUM_EMBEDDINGS, made_dataset, open_dataset
from tsv_files import chunks

SMALL = (1000,) * NUM_CATS
SPLITS = ("train", "val", "test")


def opened(path, *, num_embeddings=SMALL):
    return open_dataset(path, num_embeddings=num_embeddings)


def places(batches):
    """The first column's ids of each batch's rows."""
    return [batch.sparse_features["cat_0"].values().tolist() for batch in batches]


def flat(batches):
    """The first column's ids of all the batches' rows."""
    return list(chain.from_iterable(places(batches)))


def save_npy(folder, prefix, rows, *, sparse_dtype, labels_shape=(-1, 1)):
    """Saves rows whose first id is their place, as TorchRec's scripts do."""
    sparse = np.zeros((len(rows), NUM_CATS), sparse_dtype)
    sparse[:, 0] = rows
    labels = np.array([row % 2 for row in rows], np.int32).reshape(labels_shape)
    for kind, array in (
        ("dense", np.ones((len(rows), 13), np.float32)),
        ("sparse", sparse),
        ("labels", labels),
    ):
        np.save(folder / f"{prefix}_{kind}.npy", array)


def make_files(form, folder):
    """Makes 42 rows of a form whose first id is their place and returns their path."""
    path, text = folder / "rows", "".join(f"{text}\n" for text in numbered(42)).encode()
    days = [range(14), range(14, 36), range(36, 42)]
    match form:
        case "plain":
            path.write_bytes(text)
        case "gzip":
            path.write_bytes(gzip.compress(text))
        case "gzip of two members":
            path.write_bytes(gzip.compress(text[:500]) + gzip.compress(text[500:]))
        case "windows line ends":
            path.write_bytes(text.replace(b"\n", b"\r\n"))
        case "no last line end":
            path.write_bytes(text.removesuffix(b"\n"))
        case "days" | "gzip days":
            path.mkdir()
            for i, rows in enumerate(days):
                part = "".join(f"{x}\n" for x in numbered(len(rows), first=rows[0])).encode()
                gz = form == "gzip days"
                name = f"day_{i}" + (".gz" if gz else "")
                (path / name).write_bytes(gzip.compress(part) if gz else part)
        case "raw npy days" | "shuffled npy days":
            path.mkdir()
            dtype = np.int64 if form == "raw npy days" else np.int32
            for i, rows in enumerate(days):
                save_npy(path, f"day_{i}", rows, sparse_dtype=dtype)
        case "npy":
            path.mkdir()
            save_npy(path, "train", range(42), sparse_dtype=np.int64, labels_shape=(-1,))
    return path


FORMS = (
    *("plain", "gzip", "gzip of two members", "windows line ends", "no last line end", "days"),
    *("gzip days", "raw npy days", "shuffled npy days", "npy"),
)


def test_tables_have_the_published_number_of_rows():
    assert len(KAGGLE_NUM_EMBEDDINGS) == len(TERABYTE_NUM_EMBEDDINGS) == NUM_CATS
    assert sum(KAGGLE_NUM_EMBEDDINGS) == 33_762_577
    assert sum(TERABYTE_NUM_EMBEDDINGS) == 49_126_297


def test_batch_is_column_major_with_one_id_a_bag(tmp_path):
    rows = [line(1, cats=["a", "b"]), line(0, cats=["c", "d"])] * 14
    (batch,) = opened(write(tmp_path / "rows", rows)).batches("val", batch_size=9)
    assert batch.labels.tolist() == [1, 0]
    assert batch.labels.dtype == torch.int64
    assert batch.sparse_features.values()[:4].tolist() == [10, 12, 11, 13]
    assert batch.sparse_features.lengths().tolist() == [1] * (2 * NUM_CATS)
    assert batch.sparse_features.stride() == 2
    assert batch.dense_features.shape == (2, 13)


def test_ids_are_exact_int64_modulo_the_rows_of_their_table(tmp_path):
    ids = ["ffffffff", "fffffffffffffff", "", "0"]
    path = write(tmp_path / "rows", [line(i % 2, cats=ids) for i in range(28)])
    sizes = (10131227, 2**59 + 55, *SMALL[2:])
    batch = next(opened(path, num_embeddings=sizes).batches("train", batch_size=1))
    values = batch.sparse_features.values()
    assert values.dtype == torch.int64
    assert values[:4].tolist() == [0xFFFFFFFF % 10131227, (2**60 - 1) % (2**59 + 55), 0, 0]


def test_malformed_line_is_named_with_its_file_and_number(tmp_path):
    rows = numbered(20_000)
    rows[12_345] = line(2)
    path = write(tmp_path / "rows.tsv", rows)
    with pytest.raises(ValueError, match=r"rows\.tsv, line 12346: the label must be 0 or 1"):
        opened(path)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([0] * 28, r"the train rows must hold both labels .* got \[0\] in 24 rows"),
        ([1] * 28, r"the train rows must hold both labels .* got \[1\] in 24 rows"),
        ([0, 1] * 12 + [0, 0, 0, 1], r"the val rows must hold both labels .* got \[0\] in 2 rows"),
        ([0, 1] * 13 + [1, 1], r"the test rows must hold both labels .* got \[1\] in 2 rows"),
        ([1], r"the train rows must hold both labels .* got \[\] in 0 rows"),
    ],
)
def test_split_with_one_label_is_refused(tmp_path, labels, message):
    with pytest.raises(ValueError, match=message):
        opened(write(tmp_path / "rows.tsv", [line(label) for label in labels]))


@pytest.mark.parametrize(
    ("num_rows", "message"),
    [
        (1, r"--made_rows 1: the train rows must hold both labels .* got \[\] in 0 rows"),
        (20, r"--made_rows 20: the val rows must hold both labels .* got \[1\] in 2 rows"),
    ],
)
def test_made_rows_too_few_for_an_auroc_are_refused(num_rows, message):
    with pytest.raises(ValueError, match=message):
        made_dataset(num_rows, num_embeddings=(90,) * 26, signal_columns=[1], seed=0)


def test_days_that_are_missing_between_others_are_known(tmp_path):
    for day in (1, 2, 5):
        write(tmp_path / f"day_{day}", numbered(8))
    assert opened(tmp_path).missing_days == [3, 4]
    assert opened(write(tmp_path / "rows.tsv", numbered(28))).missing_days == []


def test_missing_file_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        opened(tmp_path / "absent.tsv")


def test_empty_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match="must hold Criteo rows, got an empty file"):
        opened(write(tmp_path / "rows.tsv", []))


def test_damaged_gzip_is_refused(tmp_path):
    path = tmp_path / "rows.tsv.gz"
    path.write_bytes(gzip.compress("\n".join(numbered(1000)).encode())[:-20])
    with pytest.raises(ValueError, match="must be a whole gzip file"):
        opened(path)


def test_file_without_line_ends_is_refused(tmp_path):
    path = tmp_path / "rows.tsv"
    path.write_bytes(bytes(1_000_000))
    with pytest.raises(ValueError, match=r"rows\.tsv: a line must have at most 262144 bytes"):
        opened(path)


def test_file_that_shrank_since_it_was_checked_is_refused(tmp_path):
    path = write(tmp_path / "rows.tsv", numbered(42))
    rows = opened(path)
    write(path, numbered(20))
    with pytest.raises(ValueError, match=r"rows\.tsv: must still have 42 rows, got 20"):
        list(rows.batches("train", batch_size=8))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], r"must have day_0, day_1, \.\.\. \(plain or \.gz\) or \*_dense\.npy, got neither"),
        (["day_0", "day_0.gz"], "must have one file for day 0, got two"),
        (["day_0_dense.npy", "train_dense.npy"], "must have either day_.* or train_dense.npy"),
        (["x_dense.npy"], r"must have either day_.* or train_dense.npy, got \['x'\]"),
    ],
)
def test_folder_of_no_one_form_is_refused(tmp_path, names, message):
    for name in names:
        (tmp_path / name).touch()
    with pytest.raises(ValueError, match=message):
        opened(tmp_path)


@pytest.mark.parametrize(
    ("kind", "array", "message"),
    [
        ("dense", np.ones((42, 12), np.float32), r"_dense\.npy must be \[N, 13\] of float32, got"),
        ("sparse", np.ones((42, 26), np.float32), r"_sparse\.npy must be .* int32 or int64, got"),
        ("labels", np.ones((41, 1), np.int32), "must have equally many rows, got .*41"),
        ("labels", np.full((42, 1), -1, np.int32), r"the train rows must hold both labels"),
    ],
)
def test_npy_of_another_form_is_refused(tmp_path, kind, array, message):
    path = make_files("npy", tmp_path)
    np.save(path / f"train_{kind}.npy", array)
    with pytest.raises(ValueError, match=message):
        opened(path)


@pytest.mark.parametrize("kind", ["dense", "sparse", "labels"])
def test_a_day_that_misses_a_file_is_refused(tmp_path, kind):
    path = make_files("raw npy days", tmp_path)
    (path / f"day_0_{kind}.npy").unlink()
    with pytest.raises(FileNotFoundError, match=f"day_0_{kind}.npy"):
        opened(path)


def test_npy_that_was_cut_is_refused(tmp_path):
    path = make_files("npy", tmp_path)
    sparse = path / "train_sparse.npy"
    sparse.write_bytes(sparse.read_bytes()[:-8])
    with pytest.raises(ValueError, match=r"train_sparse\.npy must be a whole npy file"):
        opened(path)


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        ("dense", np.inf, r"train_dense\.npy, row 7: int_0 must be finite, got inf"),
        ("labels", -1, r"train_labels\.npy, row 7: the label must be 0 or 1, got -1"),
    ],
)
def test_npy_value_that_cannot_be_is_named(tmp_path, kind, value, message):  # U68
    path = make_files("npy", tmp_path)
    array = np.load(path / f"train_{kind}.npy")
    array[7] = value
    np.save(path / f"train_{kind}.npy", array)
    with pytest.raises(ValueError, match=message):
        list(opened(path).batches("train", batch_size=8, rank=1, world_size=2))


def test_u66_splits_are_disjoint_in_time_order_and_sum_to_all(tmp_path):
    rows = opened(write(tmp_path / "rows.tsv", numbered(101)))
    found = {split: flat(rows.batches(split, batch_size=8)) for split in SPLITS}
    assert found == {
        "train": list(range(86)),
        "val": list(range(86, 94)),
        "test": list(range(94, 101)),
    }
    assert [rows.num_rows(split) for split in SPLITS] == [86, 8, 7]


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("form", FORMS)
def test_u67_every_form_of_rows_loads_in_every_split(tmp_path, split, form):
    rows = opened(make_files(form, tmp_path))  # one file: sevenths; days: the last is halved
    expected = {"train": range(36), "val": range(36, 39), "test": range(39, 42)}[split]
    assert flat(rows.batches(split, batch_size=5)) == list(expected)
    batch = next(rows.batches(split, batch_size=64))
    assert batch.labels.tolist() == [row % 2 for row in expected]
    assert batch.dense_features.isfinite().all()


@pytest.mark.parametrize("form", ["plain", "gzip days", "shuffled npy days", "made"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ranks_share_every_row_in_equally_many_batches_of_equal_sizes(tmp_path, form, world_size):
    if form == "made":
        rows = made_dataset(42, num_embeddings=(2**31,) * 26, signal_columns=[1], seed=0)
    else:
        rows = opened(make_files(form, tmp_path))
    whole = flat(rows.batches("train", batch_size=64))
    shares = [
        places(rows.batches("train", batch_size=5, rank=r, world_size=world_size))
        for r in range(world_size)
    ]
    sizes = [[len(batch) for batch in share] for share in shares]
    assert all(other == sizes[0] for other in sizes)
    assert len(sizes[0]) == rows.num_batches("train", batch_size=5, world_size=world_size)
    in_turn = (
        torch.tensor([list(chain.from_iterable(share)) for share in shares]).T.flatten().tolist()
    )
    assert in_turn[:36] == whole
    assert set(in_turn[36:]) <= {whole[-1]}


@pytest.mark.parametrize("form", ["plain", "gzip", "days", "raw npy days", "made"])
def test_a_resumed_run_goes_on_at_its_row_with_any_number_of_ranks(tmp_path, form):
    if form == "made":
        rows = made_dataset(42, num_embeddings=(2**31,) * 26, signal_columns=[1], seed=0)
    else:
        rows = opened(make_files(form, tmp_path))
    whole = flat(rows.batches("train", batch_size=64))
    for start, world_size in ((0, 2), (8, 2), (15, 3), (35, 1)):
        shares = [
            flat(
                rows.batches("train", batch_size=4, rank=r, world_size=world_size, start_row=start)
            )
            for r in range(world_size)
        ]
        rest = list(chain.from_iterable(zip(*shares, strict=True)))
        assert rest[: 36 - start] == whole[start:]
        assert rows.num_batches("train", batch_size=4, world_size=world_size, start_row=start) == -(
            -(36 - start) // (4 * world_size)
        )


def test_rows_far_into_a_plain_file_are_found(tmp_path):
    rows = opened(write(tmp_path / "rows", numbered(150_000)), num_embeddings=(10**6,) * 26)
    assert len(rows.source.files[0].marks) == 3
    assert flat(rows.batches("test", batch_size=4096)) == list(range(139_286, 150_000))


def test_chunks_are_whole_lines(tmp_path):
    path = write(tmp_path / "rows", ["abc", "de", "", "fghi"], end="\n")
    with path.open("rb") as file:
        assert list(chunks(file, path=path, size=5)) == [b"abc\n", b"de\n\n", b"fghi\n"]


def test_each_epoch_reads_the_same_rows(tmp_path):
    rows = opened(write(tmp_path / "rows.tsv", numbered(30)))
    epochs = [places(rows.batches("train", batch_size=4)) for _ in range(2)]
    assert epochs[0] == epochs[1]
