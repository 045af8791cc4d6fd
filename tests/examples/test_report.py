import math

import pytest
import torch
from report import auroc_standard_error, embedding_report, measure, without_nan
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from torchrec_tt import TTEmbeddingBagConfig


# U73
def test_quality_of_four_rows_worked_by_hand():
    quality = measure(torch.tensor([0.0, 2.0, -1.0, 1.0]), torch.tensor([0, 1, 0, 0]))
    losses = [math.log(2), math.log1p(math.exp(-2)), math.log1p(math.exp(-1)), math.log1p(math.e)]
    entropy = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    assert quality.auroc == 1.0
    assert quality.base_rate == 0.25
    assert quality.logloss == pytest.approx(sum(losses) / 4)
    assert quality.normalized_entropy == pytest.approx(sum(losses) / 4 / entropy)


def test_predicting_the_base_rate_has_a_normalized_entropy_of_one():
    labels = torch.tensor([1, 0, 0, 0, 0])
    quality = measure(torch.full((5,), math.log(0.2 / 0.8), dtype=torch.float64), labels)
    assert quality.normalized_entropy == pytest.approx(1.0)
    assert quality.auroc == 0.5


def test_labels_that_are_all_the_same_have_no_auroc():
    quality = measure(torch.tensor([0.0, 1.0]), torch.tensor([1, 1]))
    assert math.isnan(quality.auroc)
    assert math.isnan(quality.normalized_entropy)
    assert quality.logloss == pytest.approx((math.log(2) + math.log1p(math.exp(-1))) / 2)
    scores = without_nan({"auroc": quality.auroc, "interval": quality.auroc_interval, "rows": [2]})
    assert scores == {"auroc": None, "interval": [None, None], "rows": [2]}


def test_standard_error_is_delongs_over_every_pair():
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(60) % 3 % 2
    scores = torch.randn(60, generator=generator).mul(2).round() + labels  # with ties
    positives, negatives = scores[labels == 1], scores[labels == 0]
    wins = (positives[:, None] > negatives) + 0.5 * (positives[:, None] == negatives)
    variance = wins.mean(1).var() / len(positives) + wins.mean(0).var() / len(negatives)
    assert auroc_standard_error(scores, labels) == pytest.approx(variance.sqrt().item(), rel=1e-5)


def test_standard_error_is_the_spread_over_repeated_samples():
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(200) % 4 // 3
    aurocs, errors = [], []
    for _ in range(200):
        logits = torch.randn(200, generator=generator) + labels
        aurocs.append(measure(logits, labels).auroc)
        errors.append(auroc_standard_error(logits, labels))
    spread = torch.tensor(aurocs).std().item()
    assert sum(errors) / len(errors) == pytest.approx(spread, rel=0.15)  # 3 errors of a std


def test_embedding_report_weighs_each_table_in_its_form():
    tt = TTEmbeddingBagConfig(
        name="t", num_embeddings=10131227, embedding_dim=16, feature_names=["f"], tt_ranks=[32, 32]
    )
    dense = EmbeddingBagConfig(name="d", num_embeddings=10, embedding_dim=16, feature_names=["g"])
    report = embedding_report([tt, dense], {"t": "row_wise", "d": "data_parallel"})
    assert report["dense_embedding_bytes"] == (10131227 + 10) * 16 * 4
    assert report["embedding_bytes"] == 495_360 * 4 + 10 * 16 * 4
    assert report["tables"][0] == {
        "name": "t",
        "kind": "tt",
        "rows": 10131227,
        "dim": 16,
        "sharding_type": "row_wise",
        "bytes": 495_360 * 4,
    }
