import dataclasses
from typing import Any

import pytest
import torch
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, PoolingType

from torchrec_tt import RowCacheConfig
from torchrec_tt.modules.embedding_configs import (
    TTEmbeddingBagConfig,
    TTEmbeddingConfig,
    check_tables,
)
from torchrec_tt.modules.embedding_modules import TTEmbeddingBagCollection, TTEmbeddingCollection
from torchrec_tt.tt.factorize import factorize_rows
from torchrec_tt.tt.shape import TTShape

TABLE = {"name": "t", "num_embeddings": 1000, "embedding_dim": 16, "feature_names": ["f"]}


def test_given_factors_make_the_shape() -> None:
    config = TTEmbeddingBagConfig(
        **TABLE, tt_ranks=[2, 3], row_factors=[10, 10, 12], col_factors=[2, 2, 4]
    )
    assert config.tt_shape == TTShape(
        num_embeddings=1000,
        embedding_dim=16,
        row_factors=(10, 10, 12),
        col_factors=(2, 2, 4),
        tt_ranks=(2, 3),
    )


def test_factors_that_are_left_out_are_chosen_for_as_many_cores_as_ranks_say() -> None:
    for num_cores in (2, 3, 4):
        shape = TTEmbeddingBagConfig(**TABLE, tt_ranks=[2] * (num_cores - 1)).tt_shape
        assert shape.num_cores == num_cores
        assert shape.num_rows_padded >= 1000
        assert shape.embedding_dim == 16


def test_row_strategy_chooses_the_factors_that_are_left_out() -> None:
    table = {**TABLE, "num_embeddings": 1_000_000, "embedding_dim": 64}
    config = TTEmbeddingBagConfig(**table, tt_ranks=[32, 32], row_strategy="fast")
    fast = factorize_rows(
        1_000_000,
        row_strategy="fast",
        col_factors=config.tt_shape.col_factors,
        tt_ranks=config.tt_shape.tt_ranks,
    )
    assert config.tt_shape.row_factors == fast != factorize_rows(1_000_000)
    with pytest.raises(ValueError, match="row_strategy must be one of"):
        TTEmbeddingBagConfig(**table, tt_ranks=[32, 32], row_strategy="quick")


@pytest.mark.parametrize("kind", [TTEmbeddingBagConfig, TTEmbeddingConfig])
def test_precision_goes_to_the_tables_lookup(kind: Any) -> None:
    collection = TTEmbeddingCollection if kind is TTEmbeddingConfig else TTEmbeddingBagCollection
    for precision in (None, "highest", "high", "medium"):
        config = kind(**TABLE, tt_ranks=[2, 2], precision=precision)
        table = collection([config], device="meta").table_modules()["t"]
        lookups = [m._lookup.precision for m in table.modules() if hasattr(m, "_lookup")]
        assert lookups == [precision]
    with pytest.raises(ValueError, match=r"precision must be .*, got 'tf32' for table 't'"):
        kind(**TABLE, tt_ranks=[2, 2], precision="tf32")


def test_a_config_can_be_replaced_field_by_field() -> None:
    config = TTEmbeddingBagConfig(**TABLE, tt_ranks=[2, 2])
    larger = dataclasses.replace(config, num_embeddings=5000)
    assert larger.tt_shape.num_embeddings == 5000
    assert larger.tt_ranks == [2, 2]


def test_cores_have_the_dtype_of_the_config() -> None:
    for data_type, dtype in (
        (DataType.FP32, torch.float32),
        (DataType.BF16, torch.bfloat16),
        (DataType.FP16, torch.float16),
    ):
        assert TTEmbeddingBagConfig(**TABLE, tt_ranks=[2], data_type=data_type).core_dtype == dtype


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tt_ranks": []}, "tt_ranks must have one entry fewer"),
        ({"tt_ranks": [2, 0]}, "tt_ranks must be positive"),
        ({"tt_ranks": [2, 2], "row_factors": [10, 10, 9]}, "row_factors must have a product"),
        ({"tt_ranks": [2, 2], "row_factors": [40, 25]}, "must have"),
        ({"tt_ranks": [2, 2], "col_factors": [2, 2, 3]}, "col_factors must have the product"),
        ({"tt_ranks": 8}, "tt_ranks must be a list of integers, got 8 for table 't'"),
        ({"tt_ranks": torch.tensor([4, 4])}, "tt_ranks must be a list of integers"),
        ({"tt_ranks": [2, 2], "row_factors": 5}, "row_factors must be a list of integers"),
        ({"tt_ranks": [2, 2], "col_factors": 5}, "col_factors must be a list of integers"),
        ({"tt_ranks": [2, 2], "tt_init": "bogus"}, "tt_init must be one .*'bogus' for table 't'"),
        (
            {"tt_ranks": [2, 2], "data_type": DataType.INT8},
            "must be one .*FP32.*BF16.*INT8",
        ),
        ({"tt_ranks": [2, 2], "data_type": "fp32"}, "data_type must be one .*got 'fp32'"),
        ({"tt_ranks": [2, 2], "pooling": "sum"}, "pooling must be .*got 'sum' for table 't'"),
        ({"tt_ranks": [2, 2], "pooling": PoolingType.NONE}, "pooling must be"),
        ({"tt_ranks": [2, 2], "init_fn": torch.nn.init.zeros_}, "init_fn must be left unset"),
        ({"tt_ranks": [2, 2], "weight_init_max": 0.1}, "weight_init_max must be left unset"),
        ({"tt_ranks": [2, 2], "weight_init_max": 0.0}, "weight_init_max must be left unset"),
        ({"tt_ranks": [2, 2], "use_virtual_table": True}, "use_virtual_table must be left unset"),
    ],
)
def test_a_config_that_does_not_fit_raises(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TTEmbeddingBagConfig(**TABLE, **arguments)


def test_a_sequence_config_has_the_same_shape_and_the_same_checks() -> None:
    arguments = {**TABLE, "tt_ranks": [2, 3]}
    config = TTEmbeddingConfig(**arguments)
    assert config.tt_shape == TTEmbeddingBagConfig(**arguments).tt_shape
    assert not hasattr(config, "pooling")
    with pytest.raises(ValueError, match="init_fn must be left unset"):
        TTEmbeddingConfig(**arguments, init_fn=torch.nn.init.zeros_)


def regular(**arguments: Any) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(**{**TABLE, **arguments})


@pytest.mark.parametrize(
    ("tables", "is_weighted", "message"),
    [
        ([regular(), regular()], False, "distinct names, got 't' twice"),
        ([regular(num_embeddings=2**62)], False, r"below 2\^61 for a regular table, got 46.*'t'"),
        ([regular(data_type=DataType.INT8)], False, "data_type must be one of"),
        ([regular(data_type=DataType.BF16)], False, "data_type must be one of"),
        ([regular(data_type="fp32")], False, "data_type must be one of .*got 'fp32'"),
        ([regular(pooling=PoolingType.NONE)], False, "pooling must be PoolingType.SUM or MEAN"),
        ([regular(pooling="sum")], False, "pooling must be .*got 'sum' for table 't'"),
        ([], False, "at least one table"),
        (
            [TTEmbeddingConfig(**TABLE, tt_ranks=[2, 2])],
            False,
            "tables must be EmbeddingBagConfig or TTEmbeddingBagConfig, got TTEmbeddingConfig",
        ),
        ([regular(pooling=PoolingType.MEAN)], True, "pooling must be SUM in a weighted"),
    ],
)
def test_tables_that_cannot_form_a_collection_raise(
    tables: list[EmbeddingBagConfig], is_weighted: bool, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_tables(tables, is_weighted=is_weighted)


def test_a_cache_must_be_a_config_of_no_more_rows_than_the_table_has() -> None:
    assert TTEmbeddingBagConfig(**TABLE, tt_ranks=[2]).cache is None
    cache = RowCacheConfig(num_rows=1000)
    assert TTEmbeddingBagConfig(**TABLE, tt_ranks=[2], cache=cache).cache is cache
    with pytest.raises(ValueError, match=r"cache must be a RowCacheConfig or None, got 0\.1"):
        TTEmbeddingBagConfig(**TABLE, tt_ranks=[2], cache=0.1)
    with pytest.raises(ValueError, match=r"cache\.num_rows must be at most num_embeddings, 1000"):
        TTEmbeddingBagConfig(**TABLE, tt_ranks=[2], cache=RowCacheConfig(num_rows=1001))
