"""What a run is to train: its tables, rows and checkpoints, from its flags."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baselines import HASHED, Hashed, hashed_tables
from checkpoints import Saved, check_settings, find
from data import CriteoDataset, made_dataset, open_dataset
from flags import MADE, Flags
from model import (
    DLRMConfig,
    OptimizerConfig,
    Planned,
    configs_of_file,
    largest_columns,
    plan_dlrm,
    table_configs,
)
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig

from torchrec_tt import RowCacheConfig, TTEmbeddingBagConfig

_MADE_SIGNAL_COLUMNS = 3
_INTERACTION_FLAGS = {
    "original": (),
    "dcn": ("dcn_num_layers", "dcn_low_rank_dim"),
    "projection": ("interaction_branch1_layer_sizes", "interaction_branch2_layer_sizes"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """A model that a run trains.

    Attributes:
        name: begins its files' names; none for the model that the run is about.
        configs: its tables.
        stored: what it keeps in their place, which is the same but for `--compression`.
        settings: what a checkpoint must have too to fit it.
        folder: of its checkpoints; None writes none.
        saved: the checkpoint that it goes on from.
    """

    name: str
    configs: list[EmbeddingBagConfig]
    stored: list[EmbeddingBagConfig]
    settings: dict[str, Any]
    folder: Path | None
    saved: Saved | None


def tables(flags: Flags) -> list[EmbeddingBagConfig]:
    """Returns the tables that the flags ask for.

    Raises:
        ValueError: for tables that cannot be.
        OSError: for a file of tables that cannot be read.
    """
    if flags.tables is not None:
        return configs_of_file(Path(flags.tables), embedding_dim=flags.embedding_dim)
    sizes = flags.num_embeddings_per_feature
    return table_configs(
        sizes,
        embedding_dim=flags.embedding_dim,
        tt_columns=largest_columns(sizes, count=flags.tt_tables),
        tt_ranks=[flags.tt_rank] * (flags.tt_cores - 1),
        cache=None if flags.tt_cache is None else RowCacheConfig(load_factor=flags.tt_cache),
        tt_init=flags.tt_init,
        row_strategy=flags.tt_row_strategy,
    )


def compressed_tables(configs: list[EmbeddingBagConfig]) -> list[str]:
    """Returns the names of the tables that TT, or what is compared with it, makes smaller."""
    return [config.name for config in configs if isinstance(config, TTEmbeddingBagConfig)]


def trained_tables(flags: Flags, configs: list[EmbeddingBagConfig]) -> list[EmbeddingBagConfig]:
    """Returns the tables in the form in which `--compression` has them trained."""
    return dense_tables(configs) if flags.compression in ("int4", "none") else configs


def open_rows(flags: Flags, configs: list[EmbeddingBagConfig]) -> CriteoDataset:
    """Returns the checked rows; made-up ones' signal is in TT tables.

    Raises:
        ValueError: for rows or sizes that cannot be trained on; the same on every rank.
        OSError: for files that cannot be read.
    """
    sizes = [config.num_embeddings for config in configs]
    if flags.data != MADE:
        return open_dataset(Path(flags.data), num_embeddings=sizes)
    is_tt = [isinstance(config, TTEmbeddingBagConfig) for config in configs]
    columns = [c for c in largest_columns(sizes, count=len(sizes)) if is_tt[c]]
    if not columns:
        raise ValueError("--tables must have a TT table, which made rows' labels depend on")
    return made_dataset(
        flags.made_rows,
        num_embeddings=sizes,
        signal_columns=columns[-_MADE_SIGNAL_COLUMNS:],
        seed=flags.seed,
        signal=flags.made_signal,
    )


def model_of(
    flags: Flags, configs: list[EmbeddingBagConfig], *, rows: CriteoDataset, name: str = ""
) -> Model:
    """Returns a model of these tables, and the checkpoint that it goes on from.

    Raises:
        ValueError: if `--compression_bytes` are too few, or the folder has a checkpoint that does
            not fit, or must not have one.
    """
    settings = _settings(flags, configs, num_train_rows=rows.num_rows("train"))
    stored = _stored_tables(flags, configs)
    if flags.checkpoint_dir is None:
        return Model(
            name=name, configs=configs, stored=stored, settings=settings, folder=None, saved=None
        )
    folder = Path(flags.checkpoint_dir) / name
    saved = find(folder, resume=flags.resume)
    if saved is not None:
        check_settings(saved, settings)
    return Model(
        name=name, configs=configs, stored=stored, settings=settings, folder=folder, saved=saved
    )


def plan(
    flags: Flags,
    configs: list[EmbeddingBagConfig],
    *,
    fixed_types: Mapping[str, str] | None = None,
) -> Planned:
    """Returns the model of these tables and how it is to be sharded.

    Raises:
        PlannerError: if the tables do not fit the ranks.
    """
    names = [field.name for field in dataclasses.fields(DLRMConfig)]
    return plan_dlrm(
        configs,
        dlrm=DLRMConfig(**{name: getattr(flags, name) for name in names}),
        batch_size=flags.batch_size,
        optimizer=optimizer_config(flags),
        is_planned_freely=flags.tables is not None,
        fixed_types=fixed_types,
        hashed=_hashed(flags, configs),
    )


def optimizer_config(flags: Flags) -> OptimizerConfig:
    """Returns the optimizer that the flags ask for."""
    return OptimizerConfig(
        learning_rate=flags.learning_rate,
        adagrad=flags.adagrad,
        freeze_tt=flags.freeze_tt,
        eps=flags.eps,
    )


def dense_tables(configs: list[EmbeddingBagConfig]) -> list[EmbeddingBagConfig]:
    """Returns the tables uncompressed."""
    return table_configs(
        [config.num_embeddings for config in configs], embedding_dim=configs[0].embedding_dim
    )


def _hashed(flags: Flags, configs: list[EmbeddingBagConfig]) -> Hashed | None:
    if flags.compression not in HASHED or not compressed_tables(configs):
        return None
    return hashed_tables(
        configs, method=flags.compression, num_bytes=flags.compression_bytes, seed=flags.seed
    )


def _stored_tables(flags: Flags, configs: list[EmbeddingBagConfig]) -> list[EmbeddingBagConfig]:
    hashed = _hashed(flags, configs)
    if hashed is not None:
        return hashed.tables
    if flags.compression != "int4":
        return configs
    names = compressed_tables(tables(flags))
    return [
        dataclasses.replace(config, data_type=DataType.INT4) if config.name in names else config
        for config in configs
    ]


def _settings(
    flags: Flags, configs: list[EmbeddingBagConfig], *, num_train_rows: int
) -> dict[str, Any]:
    """Returns what a checkpoint's run and one that resumes from it must both have."""
    names = (
        *("dense_arch_layer_sizes", "over_arch_layer_sizes", "interaction_type"),
        *_INTERACTION_FLAGS[flags.interaction_type],
        *("adagrad", "freeze_tt", "data", "compression", "compression_bytes"),
    )
    made = {"--seed of made rows": flags.seed, "--made_signal": flags.made_signal}
    return {
        **{f"table {config.name}": _description(config) for config in configs},
        **{f"--{name}": getattr(flags, name) for name in names},
        "the number of training rows": num_train_rows,
        **(made if flags.data == MADE else {}),
    }


def _description(config: EmbeddingBagConfig) -> str:
    size = f"{config.num_embeddings} rows of dim {config.embedding_dim}"
    if not isinstance(config, TTEmbeddingBagConfig):
        return f"{size}, uncompressed"
    shape = config.tt_shape
    return (
        f"{size}, TT ranks {list(shape.tt_ranks)}, row factors {list(shape.row_factors)}, "
        f"column factors {list(shape.col_factors)}"
    )
