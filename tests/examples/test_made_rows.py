import pytest
import torch
from data import KAGGLE_NUM_EMBEDDINGS, read_batches, scan
from made_rows import write_made_rows
from torchmetrics.functional.classification import binary_auroc

SMALL = (200,) * 26


def make(path, *, num_rows=7000, num_embeddings=SMALL, signal_columns=(3, 7), seed=0):
    best_auroc = write_made_rows(
        path,
        num_rows=num_rows,
        num_embeddings=num_embeddings,
        signal_columns=signal_columns,
        seed=seed,
    )
    return best_auroc, scan(path)


def whole_split(file, split, *, num_embeddings=SMALL):
    (batch,) = read_batches(file, split, num_embeddings=num_embeddings, batch_size=file.num_rows)
    return batch


def rate_auroc(train, test, *, column):
    """AUROC on the test rows of each id's ratio of positives in the training rows."""
    ids = train.sparse_features[f"cat_{column}"].values()
    positives = torch.bincount(ids, weights=train.labels.double(), minlength=SMALL[column])
    rates = (positives + 1) / (torch.bincount(ids, minlength=SMALL[column]) + 2)
    scores = rates[test.sparse_features[f"cat_{column}"].values()]
    return binary_auroc(scores, test.labels).item()


def test_the_same_seed_makes_the_same_file(tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        make(tmp_path / name, num_rows=700, seed=seed)
    a, b, c = ((tmp_path / name).read_bytes() for name in "abc")
    assert a == b
    assert a != c


@pytest.mark.slow
def test_ids_fill_the_kaggle_tables_by_a_power_law(tmp_path):
    _, file = make(tmp_path / "rows", num_embeddings=KAGGLE_NUM_EMBEDDINGS)
    unhashed = whole_split(file, "train", num_embeddings=(2**40,) * 26).sparse_features
    for column, num_embeddings in enumerate(KAGGLE_NUM_EMBEDDINGS):
        ids = unhashed[f"cat_{column}"].values()
        assert ids.min() >= 0
        assert ids.max() < num_embeddings
        # P(id < rows / 512) = 512 ** (-1 / 9) = 1 / 2 where ids are rounded little.
        if num_embeddings > 90_000:
            assert (ids < num_embeddings / 512).double().mean() == pytest.approx(0.5, abs=0.03)


@pytest.mark.slow
def test_labels_depend_on_the_signal_columns_alone(tmp_path):
    best_auroc, file = make(tmp_path / "rows", num_rows=14_000)
    train, test = whole_split(file, "train"), whole_split(file, "test")
    aurocs = [rate_auroc(train, test, column=column) for column in range(26)]
    signal = [aurocs.pop(7), aurocs.pop(3)]
    assert min(signal) > 0.6
    assert max(signal) < best_auroc
    assert max(abs(auroc - 0.5) for auroc in aurocs) < 0.04  # 2.8 standard errors of 2000 rows


@pytest.mark.slow
def test_best_auroc_is_reached_by_what_knows_the_only_signal_column(tmp_path):
    best_auroc, file = make(tmp_path / "rows", num_rows=35_000, signal_columns=(3,))
    train, test = whole_split(file, "train"), whole_split(file, "test")
    assert rate_auroc(train, test, column=3) == pytest.approx(best_auroc, abs=0.01)
