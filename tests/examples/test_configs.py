from pathlib import Path

import pytest
import yaml
from model import configs_of_file, dense_bytes, largest_columns, table_bytes, table_configs
from train import parse_args

from torchrec_tt import TTEmbeddingBagConfig

CRITEO = Path(__file__).parents[2] / "examples" / "criteo"
NAMES = ("kaggle", "terabyte", "demo")
FACTORS = {
    10131227: (200, 220, 250),
    8351593: (200, 200, 209),
    7046547: (200, 200, 200),
    5461306: (166, 175, 188),
    2202608: (125, 130, 136),
    286181: (53, 72, 75),
    142572: (50, 52, 55),
}


def read(name):
    return yaml.safe_load((CRITEO / "configs" / f"{name}.yaml").read_text())


def tables(config):
    rows = config["num_embeddings_per_feature"]
    return table_configs(
        rows,
        embedding_dim=config["embedding_dim"],
        tt_columns=largest_columns(rows, count=config["tt_tables"]),
        tt_ranks=[config["tt_rank"]] * (config["tt_cores"] - 1),
    )


def bytes_of(configs):
    return sum(map(dense_bytes, configs)), sum(map(table_bytes, configs))


@pytest.mark.parametrize("name", NAMES)
def test_keys_of_a_config_are_flags(name):
    flags = parse_args([])
    assert [key for key in read(name) if not hasattr(flags, key)] == []


@pytest.mark.parametrize("name", NAMES)
def test_layers_of_a_config_fit_its_tables(name):
    config = read(name)
    assert config["dense_arch_layer_sizes"][-1] == config["embedding_dim"]
    assert config["over_arch_layer_sizes"][-1] == 1
    assert len(config["num_embeddings_per_feature"]) == 26


def test_the_kaggle_config_has_the_papers_shapes_and_compression():
    configs = tables(read("kaggle"))
    tt = [config for config in configs if isinstance(config, TTEmbeddingBagConfig)]
    assert {c.num_embeddings: c.tt_shape.row_factors for c in tt} == FACTORS
    assert {c.tt_shape.col_factors for c in tt} == {(2, 2, 4)}
    dense, actual = bytes_of(configs)
    assert (dense, actual) == (2_160_804_928, 18_412_480)
    assert dense / actual == pytest.approx(117.4, abs=0.1)


def test_the_terabyte_config_has_the_papers_rows_and_compression():
    configs = tables(read("terabyte"))
    assert sum(config.num_embeddings for config in configs) == 49_126_297
    dense, actual = bytes_of(configs)
    assert (dense, actual) == (12_576_332_032, 111_732_864)
    assert dense / actual > 112


def test_the_planners_kaggle_file_and_the_kaggle_config_have_the_same_tables():
    of_flags, of_file = (
        tables(read("kaggle")),
        configs_of_file(CRITEO / "kaggle_tables.yaml", embedding_dim=16),
    )
    assert bytes_of(of_flags) == bytes_of(of_file)
