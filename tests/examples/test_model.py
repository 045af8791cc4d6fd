from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from data import KAGGLE_NUM_EMBEDDINGS, made_dataset
from model import (
    DLRMConfig,
    OptimizerConfig,
    configs_of_file,
    largest_columns,
    plan_dlrm,
    shard,
    sharding_types,
    table_bytes,
    table_configs,
)

from torchrec_tt import TTEmbeddingBagConfig

SIZES = (50, *(3,) * 22, 2000, 3000, 4000)
BATCH_SIZE = 50


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def small_dlrm(*, adagrad, freeze_tt, over_arch_layer_sizes=(8, 1)):
    torch.manual_seed(0)
    configs = table_configs(SIZES, embedding_dim=8, tt_columns=(23, 24, 25), tt_ranks=(2, 2))
    config = OptimizerConfig(learning_rate=0.1, adagrad=adagrad, freeze_tt=freeze_tt)
    planned = plan_dlrm(
        configs,
        dlrm=DLRMConfig(
            dense_arch_layer_sizes=[8], over_arch_layer_sizes=list(over_arch_layer_sizes)
        ),
        batch_size=BATCH_SIZE,
        optimizer=config,
    )
    return shard(planned, optimizer=config)


def moved_by_a_step(*, adagrad, freeze_tt):
    """Returns for the MLPs, and for the cores by sharding type, whether a step moved each."""
    model, optimizer = small_dlrm(adagrad=adagrad, freeze_tt=freeze_tt)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    rows = made_dataset(350, num_embeddings=SIZES, signal_columns=[25], seed=0)
    loss, _ = model(next(rows.batches("train", batch_size=BATCH_SIZE)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    types = sharding_types(model)
    moved: dict[str, set[bool]] = {}
    for name, parameter in model.named_parameters():
        kind = "mlp"
        if ".embedding_bags." in name:
            table = name.split(".embedding_bags.")[1].split(".")[0]
            kind = types[table] if ".tt_cores." in name else "dense table"
        moved.setdefault(kind, set()).add(not torch.equal(parameter, before[name]))
    return moved


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("sizes", [(10**8, 10**8, 1), (2**31 - 1, 2**31 - 1, 1)])
def test_layers_that_do_not_fit_in_memory_are_refused(sizes):
    with pytest.raises(ValueError, match="the model's layers must fit in memory, got "):
        small_dlrm(adagrad=True, freeze_tt=False, over_arch_layer_sizes=sizes)


def test_the_largest_tables_come_first():
    assert largest_columns(KAGGLE_NUM_EMBEDDINGS, count=7) == [2, 11, 20, 15, 3, 23, 25]


def test_seven_kaggle_tables_at_rank_32_are_117_times_smaller():
    configs = table_configs(
        KAGGLE_NUM_EMBEDDINGS,
        embedding_dim=16,
        tt_columns=largest_columns(KAGGLE_NUM_EMBEDDINGS, count=7),
        tt_ranks=[32, 32],
    )
    assert sum(isinstance(config, TTEmbeddingBagConfig) for config in configs) == 7
    ratio = 33_762_577 * 16 * 4 / sum(map(table_bytes, configs))
    assert ratio == pytest.approx(117.4, abs=0.05)


@pytest.mark.slow
@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("adagrad", [False, True])
def test_frozen_cores_stay_while_everything_else_trains(adagrad):
    moved = moved_by_a_step(adagrad=adagrad, freeze_tt=True)
    for sharding_type in ("row_wise", "table_wise", "data_parallel"):
        assert moved.pop(sharding_type) == {False}
    assert all(True in values for values in moved.values())


@pytest.mark.slow
@pytest.mark.usefixtures("one_rank")
def test_cores_of_every_sharding_type_train():
    moved = moved_by_a_step(adagrad=True, freeze_tt=False)
    for sharding_type in ("row_wise", "table_wise", "data_parallel"):
        assert moved.pop(sharding_type) == {True}


KAGGLE = Path(__file__).parents[2] / "examples/criteo/kaggle_tables.yaml"


def test_the_tables_of_a_model_file_are_those_of_the_flags() -> None:
    expected = table_configs(
        KAGGLE_NUM_EMBEDDINGS,
        embedding_dim=16,
        tt_columns=largest_columns(KAGGLE_NUM_EMBEDDINGS, count=7),
        tt_ranks=[32, 32],
    )
    found = configs_of_file(KAGGLE, embedding_dim=16)
    assert [type(config) for config in found] == [type(config) for config in expected]
    assert [(c.name, c.num_embeddings, c.feature_names) for c in found] == [
        (c.name, c.num_embeddings, c.feature_names) for c in expected
    ]
    assert [table_bytes(c) for c in found] == [table_bytes(c) for c in expected]


def test_a_model_file_of_other_tables_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.yaml"
    path.write_text("tables: [{name: t, num_embeddings: 10, embedding_dim: 16}]")
    with pytest.raises(ValueError, match=r"model\.yaml must have a table for each of .*'cat_25'"):
        configs_of_file(path, embedding_dim=16)
    with pytest.raises(ValueError, match="must have tables of dim 8, got 16 for table 't_cat_0'"):
        configs_of_file(KAGGLE, embedding_dim=8)
