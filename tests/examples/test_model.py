import pytest
import torch
import torch.distributed as dist
from data import KAGGLE_NUM_EMBEDDINGS, make_batch
from model import (
    OptimizerConfig,
    largest_columns,
    sharded_dlrm,
    sharding_types,
    table_bytes,
    table_configs,
)

from torchrec_tt import TTEmbeddingBagConfig

SIZES = (50, *(3,) * 22, 2000, 3000, 4000)
ROWS = [b"\t".join([b"%d" % (i % 2), *[b"%d" % i] * 13, *[b"%x" % i] * 26]) for i in range(8)]


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def small_dlrm(*, adagrad, freeze_tt):
    torch.manual_seed(0)
    configs = table_configs(SIZES, embedding_dim=8, tt_columns=(23, 24, 25), tt_ranks=(2, 2))
    return sharded_dlrm(
        configs,
        dense_arch_layer_sizes=[8],
        over_arch_layer_sizes=[8, 1],
        batch_size=len(ROWS),
        optimizer=OptimizerConfig(learning_rate=0.1, adagrad=adagrad, freeze_tt=freeze_tt),
    )


def moved_by_a_step(*, adagrad, freeze_tt):
    """Returns for the MLPs, and for the cores by sharding type, whether a step moved each."""
    model, optimizer = small_dlrm(adagrad=adagrad, freeze_tt=freeze_tt)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    loss, _ = model(make_batch(ROWS, num_embeddings=torch.tensor(SIZES)))
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
