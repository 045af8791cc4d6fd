import gzip
import math
from itertools import chain

import pytest
import torch
from data import KAGGLE_NUM_EMBEDDINGS, make_batch, read_batches, scan

NUM_INTS, NUM_CATS = 13, 26
SMALL = (1000,) * NUM_CATS


def line(label=0, *, ints=(), cats=()):
    """A row's text, blank where nothing is given."""
    ints = [*ints, *[""] * (NUM_INTS - len(ints))]
    cats = [*cats, *[""] * (NUM_CATS - len(cats))]
    return "\t".join(str(value) for value in [label, *ints, *cats])


def write(path, lines, *, end="\n"):
    path.write_bytes("".join(text + end for text in lines).encode())
    return path


def numbered(num_rows):
    """Rows whose first id is their place, with both labels in every split."""
    return [line(i % 2, cats=[f"{i:x}"]) for i in range(num_rows)]


def places(batches):
    """The first column's ids of each batch's rows."""
    return [batch.sparse_features["cat_0"].values().tolist() for batch in batches]


def flat(batches):
    """The first column's ids of all the batches' rows."""
    return list(chain.from_iterable(places(batches)))


def test_kaggle_tables_have_the_published_number_of_rows():
    assert len(KAGGLE_NUM_EMBEDDINGS) == NUM_CATS
    assert sum(KAGGLE_NUM_EMBEDDINGS) == 33_762_577


def test_batch_is_column_major_with_one_id_a_bag():
    rows = [line(1, cats=["a", "b"]).encode(), line(0, cats=["c", "d"]).encode()]
    batch = make_batch(rows, num_embeddings=torch.tensor(SMALL))
    assert batch.labels.tolist() == [1, 0]
    assert batch.sparse_features.values()[:4].tolist() == [10, 12, 11, 13]
    assert batch.sparse_features.lengths().tolist() == [1] * (2 * NUM_CATS)
    assert batch.sparse_features.stride() == 2


def test_ids_are_exact_int64_modulo_the_rows_of_their_table():
    ids = ["ffffffff", "fffffffffffffff", "", "0"]
    sizes = torch.tensor((10131227, 2**59 + 55, *SMALL[2:]))
    batch = make_batch([line(cats=ids).encode()], num_embeddings=sizes)
    values = batch.sparse_features.values()
    assert values.dtype == torch.int64
    assert values[:4].tolist() == [0xFFFFFFFF % 10131227, (2**60 - 1) % (2**59 + 55), 0, 0]


def test_u68_integers_are_finite_whatever_their_sign_and_zero_where_missing():
    row = line(ints=[-3, -1, 0, "", 5, 10**18 - 1]).encode()
    dense = make_batch([row], num_embeddings=torch.tensor(SMALL)).dense_features
    assert dense.dtype == torch.float32
    assert dense[0, :5].tolist() == pytest.approx([0, 0, 0, 0, math.log(6)])
    assert dense.isfinite().all()


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("0\t1\t2", "must have 40 tab-separated fields, got 3"),
        ("", "must have 40 tab-separated fields, got 1"),
        (line() + "\t", "must have 40 tab-separated fields, got 41"),
        (line(2), "the label must be 0 or 1, got b'2'"),
        (line(""), "the label must be 0 or 1, got b''"),
        (line(ints=[1, "1.5"]), "int_1 must be an integer of at most 18 digits, got b'1.5'"),
        (line(ints=["1_0"]), "int_0 must be an integer of at most 18 digits, got b'1_0'"),
        (line(ints=[10**18]), "int_0 must be an integer of at most 18 digits"),
        (line(cats=["", "xyz"]), "cat_1 must be at most 15 hexadecimal digits, got b'xyz'"),
        (line(cats=["-1"]), "cat_0 must be at most 15 hexadecimal digits, got b'-1'"),
        (line(cats=["0" * 16]), "cat_0 must be at most 15 hexadecimal digits"),
    ],
)
def test_malformed_line_is_named_with_its_file_number_and_fault(tmp_path, text, fault):
    rows = numbered(20)
    rows[3] = text
    path = write(tmp_path / "rows.tsv", rows)
    with pytest.raises(ValueError, match=r"rows\.tsv, line 4: ") as caught:
        scan(path)
    assert fault in str(caught.value)


def test_empty_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match="must hold Criteo rows, got an empty file"):
        scan(write(tmp_path / "rows.tsv", []))


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([0] * 14, "the training rows must hold both labels .* got 0 positive of 12"),
        ([1] * 14, "the training rows must hold both labels .* got 12 positive of 12"),
        ([0, 1] * 6 + [0, 0], "the test rows must hold both labels .* got 0 positive of 2"),
        ([0, 1] * 6 + [1, 1], "the test rows must hold both labels .* got 2 positive of 2"),
        ([1], "the training rows must hold both labels .* got 0 positive of 0"),
    ],
)
def test_split_with_one_label_is_refused(tmp_path, labels, message):
    path = write(tmp_path / "rows.tsv", [line(label) for label in labels])
    with pytest.raises(ValueError, match=message):
        scan(path)


def test_missing_file_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        scan(tmp_path / "absent.tsv")


def test_damaged_gzip_is_refused(tmp_path):
    path = tmp_path / "rows.tsv.gz"
    path.write_bytes(gzip.compress("\n".join(numbered(1000)).encode())[:-20])
    with pytest.raises(ValueError, match="must be a whole gzip file"):
        scan(path)


def test_u66_train_and_test_rows_are_disjoint_in_time_order_and_sum_to_all(tmp_path):
    file = scan(write(tmp_path / "rows.tsv", numbered(100)))
    assert (file.num_train_rows, file.num_test_rows, file.num_rows) == (85, 15, 100)
    rows = {
        split: flat(read_batches(file, split, num_embeddings=SMALL, batch_size=8))
        for split in ("train", "test")
    }
    assert rows == {"train": list(range(85)), "test": list(range(85, 100))}


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("form", ["plain", "gzip", "windows line ends", "no last line end"])
def test_u67_every_form_of_a_file_loads_in_every_split(tmp_path, split, form):
    path = tmp_path / "rows"
    write(path, numbered(40), end="\r\n" if form == "windows line ends" else "\n")
    if form == "gzip":
        path.write_bytes(gzip.compress(path.read_bytes()))
    if form == "no last line end":
        path.write_bytes(path.read_bytes().removesuffix(b"\n"))
    batches = read_batches(scan(path), split, num_embeddings=SMALL, batch_size=64)
    assert places(batches) == [list(range(34)) if split == "train" else list(range(34, 40))]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("num_rows", [28, 29, 100])
def test_ranks_share_every_row_in_equally_many_batches_of_equal_sizes(
    tmp_path, num_rows, world_size
):
    file = scan(write(tmp_path / "rows.tsv", numbered(num_rows)))
    shares = [
        places(
            read_batches(
                file, "train", num_embeddings=SMALL, batch_size=5, rank=r, world_size=world_size
            )
        )
        for r in range(world_size)
    ]
    sizes = [[len(batch) for batch in share] for share in shares]
    assert all(other == sizes[0] for other in sizes)
    assert len(sizes[0]) == file.num_batches("train", batch_size=5, world_size=world_size)
    in_turn = (
        torch.tensor([list(chain.from_iterable(share)) for share in shares]).T.flatten().tolist()
    )
    assert in_turn[: file.num_train_rows] == list(range(file.num_train_rows))
    assert set(in_turn[file.num_train_rows :]) <= {file.num_train_rows - 1}


def test_each_epoch_reads_the_same_rows(tmp_path):
    file = scan(write(tmp_path / "rows.tsv", numbered(30)))
    epochs = [
        places(read_batches(file, "train", num_embeddings=SMALL, batch_size=4)) for _ in range(2)
    ]
    assert epochs[0] == epochs[1]
