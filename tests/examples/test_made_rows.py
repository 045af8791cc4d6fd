from statistics import NormalDist

import numpy as np
import pytest
import torch
from blocks import concatenate
from data import KAGGLE_NUM_EMBEDDINGS, made_dataset, open_dataset
from made_rows import MadeRows, main, write_made_rows
from torchmetrics.functional.classification import binary_auroc

SMALL = (200,) * 26


def make(num_rows=7000, *, num_embeddings=SMALL, signal_columns=(3, 7), seed=0, signal="digits"):
    return made_dataset(
        num_rows,
        num_embeddings=num_embeddings,
        signal_columns=signal_columns,
        seed=seed,
        signal=signal,
    )


def whole_split(rows, split):
    (batch,) = rows.batches(split, batch_size=rows.num_rows(split))
    return batch


def rate_auroc(train, test, *, column):
    """AUROC on the test rows of each id's ratio of positives in the training rows."""
    ids = train.sparse_features[f"cat_{column}"].values()
    positives = torch.bincount(ids, weights=train.labels.double(), minlength=SMALL[column])
    rates = (positives + 1) / (torch.bincount(ids, minlength=SMALL[column]) + 2)
    scores = rates[test.sparse_features[f"cat_{column}"].values()]
    return binary_auroc(scores, test.labels).item()


@pytest.mark.parametrize("is_scattered", [False, True])
def test_a_file_of_made_rows_has_the_same_rows(tmp_path, is_scattered):
    made = MadeRows(num_rows=9000, num_embeddings=SMALL, signal_columns=[3], seed=0)
    best = write_made_rows(tmp_path / "rows", made, is_scattered=is_scattered)
    file = open_dataset(tmp_path / "rows", num_embeddings=(2**40,) * 26)
    expected = concatenate(list(made.read(range(9000))))
    found = concatenate(list(file.source.read(range(9000))))
    assert found.labels.tolist() == expected.labels.tolist()
    assert found.dense.tolist() == expected.dense.tolist()
    ids = expected.ids * (0x9E3779B1 if is_scattered else 1) % 2**32
    assert found.ids.tolist() == ids.tolist()
    assert best == make(9000, signal_columns=[3]).best_auroc


def test_other_seeds_make_other_rows():
    first, other = (next(make(700, seed=seed).batches("train", batch_size=50)) for seed in (0, 1))
    assert first.sparse_features.values().tolist() != other.sparse_features.values().tolist()
    assert first.labels.tolist() != other.labels.tolist()


@pytest.mark.parametrize("signal", ["digits", "rows"])
def test_a_part_of_the_rows_is_that_of_the_whole(signal):
    made = MadeRows(
        num_rows=30_000, num_embeddings=SMALL, signal_columns=[3], seed=0, signal=signal
    )
    whole = concatenate(list(made.read(range(30_000))))
    for rows in (range(8190, 20_000, 3), range(29_999, 30_000), range(17_000, 17_001, 7)):
        part = concatenate(list(made.read(rows)))
        selected = slice(rows.start, rows.stop, rows.step)
        assert part.ids.tolist() == whole.ids[:, selected].tolist()
        assert part.labels.tolist() == whole.labels[selected].tolist()


def test_ids_fill_the_kaggle_tables_by_a_power_law():
    rows = make(num_embeddings=KAGGLE_NUM_EMBEDDINGS)
    features = whole_split(rows, "train").sparse_features
    for column, num_embeddings in enumerate(KAGGLE_NUM_EMBEDDINGS):
        ids = features[f"cat_{column}"].values()
        assert ids.min() >= 0
        assert ids.max() < num_embeddings
        # P(id < rows / 512) = 512 ** (-1 / 9) = 1 / 2 where ids are rounded little.
        if num_embeddings > 90_000:
            assert (ids < num_embeddings / 512).double().mean() == pytest.approx(0.5, abs=0.03)


@pytest.mark.slow
def test_labels_depend_on_the_signal_columns_alone():
    rows = make(28_000)
    train, test = whole_split(rows, "train"), whole_split(rows, "test")
    aurocs = [rate_auroc(train, test, column=column) for column in range(26)]
    signal = [aurocs.pop(7), aurocs.pop(3)]
    assert min(signal) > 0.6
    assert max(signal) < rows.best_auroc
    assert max(abs(auroc - 0.5) for auroc in aurocs) < 0.04  # 2.8 standard errors of 2000 rows


@pytest.mark.slow
@pytest.mark.parametrize("signal", ["digits", "rows"])
def test_best_auroc_is_reached_by_what_knows_the_only_signal_column(signal):
    rows = make(70_000, signal_columns=(3,), signal=signal)
    train, test = whole_split(rows, "train"), whole_split(rows, "test")
    assert rate_auroc(train, test, column=3) == pytest.approx(rows.best_auroc, abs=0.015)


def test_signals_change_labels_alone():
    first, other = (
        next(make(700, signal=signal).batches("train", batch_size=50))
        for signal in ("digits", "rows")
    )
    assert first.sparse_features.values().tolist() == other.sparse_features.values().tolist()
    assert first.dense_features.tolist() == other.dense_features.tolist()
    assert first.labels.tolist() != other.labels.tolist()


def test_rows_have_independent_gaussian_effects():
    made = MadeRows(
        num_rows=10, num_embeddings=(27_000,) * 26, signal_columns=[3, 7], seed=0, signal="rows"
    )
    effects, other = (made._effects[column](np.arange(27_000)) for column in (3, 7))
    for chance in (0.01, 0.1, 0.5, 0.9, 0.99):
        below = (effects < NormalDist().inv_cdf(chance)).mean()
        assert below == pytest.approx(chance, abs=4 * np.sqrt(chance * (1 - chance) / 27_000))
    assert abs(np.corrcoef(effects, other)[0, 1]) < 0.02  # 3.3 standard errors
    # Neither the rows beside an id nor those that share a digit or two of it tell its effect.
    assert abs(np.corrcoef(effects[1:], effects[:-1])[0, 1]) < 0.02
    cube = effects.reshape(30, 30, 30)
    for axes in ((1, 2), (0, 2), (0, 1), (0,), (1,), (2,)):
        means = cube.mean(axis=axes) * np.sqrt(np.prod([30] * len(axes)))
        assert means.var() == pytest.approx(1, abs=4 * np.sqrt(2 / means.size))


@pytest.mark.parametrize("signal", ["digits", "rows"])
def test_best_auroc_is_that_of_the_true_probabilities(signal):
    made = MadeRows(num_rows=9000, num_embeddings=SMALL, signal_columns=[3], seed=0, signal=signal)
    labels, chances = made._labels(0)
    exact = binary_auroc(torch.from_numpy(chances), torch.from_numpy(labels)).item()
    assert made.best_auroc(range(len(labels))) == pytest.approx(exact, abs=1e-4)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--rows", "0", "--output", "made.tsv"], "--rows must be in [1, 2^63), got 0"),
        (["--seed", "-1", "--output", "made.tsv"], "--seed must be in [0, 2^63), got -1"),
        (["--output", "nowhere/made.tsv"], "No such file or directory: 'nowhere/made.tsv'"),
        (["--output", "."], "Is a directory: '.'"),
        (["--output", "/dev/full"], "No space left on device: '/dev/full'"),
    ],
)
def test_a_script_that_cannot_write_ends_with_one_line(
    tmp_path, monkeypatch, capsys, flags, message
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        main(["--rows", "500", *flags])
    assert caught.value.code != 0
    assert message in capsys.readouterr().err.splitlines()[-1]
    assert not list(tmp_path.iterdir())
