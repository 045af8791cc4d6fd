"""The flags of train.py: what they are called, their defaults and rules; a YAML file may give them.

Where facebookresearch/dlrm's dlrm_main.py has a flag of the name, its meaning is the same. What
that script has and this one cannot do is refused with the reason.
"""

# ruff: noqa: RUF009 (_flag is dataclasses.field)
import argparse
import dataclasses
import difflib
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
from baselines import HASHED, Compression
from data import KAGGLE_NUM_EMBEDDINGS
from made_rows import Signal

from torchrec_tt.schema import load_yaml, parse
from torchrec_tt.tt.factorize import RowStrategy
from torchrec_tt.tt.init import TTInit

MADE = "made"
PAPER_BATCH_SIZE = 128  # over all ranks

Interaction = Literal["original", "dcn", "projection"]

REFUSED = {
    "dataset_name": "--data finds out what kind of data set its path is",
    "synthetic_multi_hot_criteo_path": "rows have one id a column",
    "multi_hot_sizes": "rows have one id a column",
    "multi_hot_distribution_type": "rows have one id a column",
    "collect_multi_hot_freqs_stats": "rows have one id a column",
    "shuffle_batches": "rows are read in the order that they are stored in",
    "shuffle_training_set": "rows are read in the order that they are stored in",
    "undersampling_rate": "every row is trained on",
    "mmap_mode": "npy files are always memory-mapped",
    "pin_memory": "it trains on CPUs",
    "allow_tf32": "it trains on CPUs",
}

# What may not be given together; on the command line it takes the other's place in the file.
_CONFLICTS = {
    "tables": (
        *("num_embeddings", "num_embeddings_per_feature"),
        *("tt_tables", "tt_rank", "tt_cores", "tt_cache", "tt_init", "tt_row_strategy"),
    ),
    "num_embeddings": ("num_embeddings_per_feature",),
    "in_memory_binary_criteo_path": ("data",),
}

_RULES: dict[str, Callable[[Any], bool]] = {
    "positive": lambda value: value > 0,
    "in [1, 2^31)": lambda value: 1 <= value < 2**31,
    "a positive float32": lambda value: _FLOAT32.tiny <= value <= _FLOAT32.max,
    "at least 0": lambda value: value >= 0,
    "in (0, 1)": lambda value: 0 < value < 1,
}
_FLOAT32 = torch.finfo(torch.float32)
_MOST = 2**63  # of an int64


def _flag(default: Any, about: str, *, rule: str | None = None) -> Any:
    metadata = {"help": about, "rule": rule}
    if isinstance(default, list):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True, slots=True)
class Flags:
    """What a run is told; every field is a flag, and a key of --config."""

    data: str = _flag(MADE, f"a path to Criteo rows, or '{MADE}' for made-up ones")
    in_memory_binary_criteo_path: str | None = _flag(None, "the same as --data, for npy files")
    made_rows: int = _flag(350_000, "how many rows to make up", rule="positive")
    made_signal: Signal = _flag("digits", "what made rows' labels follow; 'rows' knows no TT")
    output_dir: str = _flag("runs/criteo", "where metrics.json goes")
    seed: int = _flag(0, "of the made rows and of the first weights", rule="at least 0")

    epochs: int = _flag(1, "passes through the training rows", rule="positive")
    batch_size: int | None = _flag(
        None, f"training rows per rank and step; {PAPER_BATCH_SIZE} / ranks", rule="in [1, 2^31)"
    )
    test_batch_size: int = _flag(
        1024, "validation and test rows per rank and step", rule="in [1, 2^31)"
    )
    drop_last_training_batch: bool = _flag(False, "leave out an epoch's last, smaller batch")
    limit_train_batches: int | None = _flag(None, "of an epoch, on each rank", rule="positive")
    limit_val_batches: int | None = _flag(None, "of a validation, on each rank", rule="positive")
    limit_test_batches: int | None = _flag(None, "of the test, on each rank", rule="positive")
    validation_freq_within_epoch: int | None = _flag(
        None, "steps between validations, besides that after each epoch", rule="positive"
    )

    learning_rate: float = _flag(0.03, "of every parameter", rule="a positive float32")
    adagrad: bool = _flag(True, "Adagrad; --no-adagrad is SGD")
    eps: float = _flag(1e-8, "of Adagrad", rule="a positive float32")
    lr_warmup_steps: int = _flag(0, "steps in which the rate rises to its value", rule="at least 0")
    lr_decay_start: int = _flag(0, "step at which the rate begins to fall", rule="at least 0")
    lr_decay_steps: int = _flag(0, "steps of the fall, as a parabola; 0 is none", rule="at least 0")
    print_lr: bool = _flag(False, "print the learning rate at every step")

    num_embeddings: int | None = _flag(None, "rows of each of the 26 tables", rule="in [1, 2^31)")
    num_embeddings_per_feature: list[int] | None = _flag(
        None, "rows of each of the 26 tables, comma separated; Criteo Kaggle's", rule="in [1, 2^31)"
    )
    embedding_dim: int = _flag(16, "columns of each table", rule="in [1, 2^31)")
    dense_arch_layer_sizes: list[int] | None = _flag(
        None, "bottom MLP; 512,256,64 and --embedding_dim", rule="in [1, 2^31)"
    )
    over_arch_layer_sizes: list[int] = _flag([512, 256, 1], "top MLP", rule="in [1, 2^31)")
    interaction_type: Interaction = _flag("original", "of dense and sparse features")
    interaction_branch1_layer_sizes: list[int] = _flag(
        [2048, 2048], "for 'projection'", rule="in [1, 2^31)"
    )
    interaction_branch2_layer_sizes: list[int] = _flag(
        [2048, 2048], "for 'projection'", rule="in [1, 2^31)"
    )
    dcn_num_layers: int = _flag(3, "for 'dcn'", rule="in [1, 2^31)")
    dcn_low_rank_dim: int = _flag(512, "for 'dcn'", rule="in [1, 2^31)")

    tt_tables: int = _flag(7, "how many of the largest tables are TT", rule="in [1, 2^31)")
    tt_rank: int = _flag(32, "every inner rank of a TT table", rule="in [1, 2^31)")
    tt_cores: Literal[2, 3, 4] = _flag(3, "cores of a TT table")
    tt_cache: float | None = _flag(
        None, "part of a TT table's rows to cache on each rank", rule="in (0, 1)"
    )
    tt_init: TTInit = _flag("sampled_gaussian", "what TT cores are drawn from")
    tt_row_strategy: RowStrategy = _flag("balanced", "row factors of the TT tables")
    compression: Compression = _flag("tt", "of the TT tables; what else TT is compared with")
    compression_bytes: int | None = _flag(
        None, "of what 'hash', 'qr' or 'robe' put for the TT tables; theirs", rule="positive"
    )
    tables: str | None = _flag(None, "a file of torchrec-tt tune in place of the tables' flags")
    freeze_tt: bool = _flag(False, "leave the TT cores as initialised")
    compare_dense: bool = _flag(False, "then train the uncompressed model too")

    plan_only: bool = _flag(False, "print the sharding plan and end, without rows")
    print_sharding_plan: bool = _flag(False, "print the sharding plan before training")
    checkpoint_dir: str | None = _flag(None, "a folder for checkpoints, one after each epoch")
    save_every: int | None = _flag(None, "steps between checkpoints, besides", rule="positive")
    keep_checkpoints: int = _flag(2, "how many of the newest to keep", rule="positive")
    resume: bool = _flag(False, "go on from the newest checkpoint, if there is one")
    tensorboard_dir: str | None = _flag(None, "a folder for TensorBoard's event files")
    profile: bool = _flag(False, "profile steps 6 to 15 into the output folder's trace.json")


def parse_args(argv: Sequence[str] | None = None) -> Flags:
    """Returns the flags, those of --config where the command line has none; exits with one line
    for what they cannot be.
    """
    parser = _parser()
    found, unknown = parser.parse_known_args(argv)
    if unknown:
        parser.error(_no_flag(unknown[0]))
    given = vars(found)
    config = given.pop("config", None)
    try:
        content = {} if config is None else read_config(Path(config))
        return flags_of(_overridden(content, given))
    except (ValueError, OSError) as error:
        parser.error(str(error))


def read_config(path: Path) -> dict[str, Any]:
    """Returns the flags of a YAML file.

    Raises:
        ValueError: for a file that is no YAML mapping, or a key or value that no flag has; names
            the file and the nearest flag; for a file of tables.
        OSError: for a file that cannot be read.
    """
    content = load_yaml(path)
    if isinstance(content, dict) and isinstance(content.get("tables"), list):
        raise ValueError(
            f"--config must be a file of flags, {path} has tables: give it to --tables"
        )
    try:
        _parsed(content)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return dict(typing.cast(dict[str, Any], content))


def flags_of(content: dict[str, Any]) -> Flags:
    """Returns checked flags from a mapping of their names to values.

    Raises:
        ValueError: for a name or value that cannot be.
    """
    flags = _parsed(content)
    for name, others in _CONFLICTS.items():
        for other in others if name in content else ():
            if other in content:
                raise ValueError(f"--{name} and --{other} must not both be given")
    flags = _with_defaults(flags)
    _check_together(flags)
    return flags


def _overridden(config: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Returns both; what the file has goes where the command line has it, or what excludes it."""
    excluded = set(given)
    for name, others in _CONFLICTS.items():
        if name in given:
            excluded.update(others)
        if excluded.intersection(others):
            excluded.add(name)
    return {name: value for name, value in config.items() if name not in excluded} | given


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Ends with one line: every rank says it."""
        self.exit(2, f"{self.prog}: error: {message}\n")


def _no_flag(text: str) -> str:
    if not text.startswith("--"):
        return f"must be given flags only, got {text}"
    names = [f"--{field.name}" for field in dataclasses.fields(Flags)]
    name, _, _ = text.partition("=")
    (near,) = difflib.get_close_matches(name, names, n=1, cutoff=0.0)
    return f"must be given flags that there are, got {text}; the nearest is {near}"


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="train.py",
        usage="train.py [--config FILE] [--FLAG VALUE ...]",
        description="Train a DLRM with Tensor-Train tables on Criteo rows.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("--config", help="a YAML file whose keys are flags; flags override it")
    hints = typing.get_type_hints(Flags)
    for field in dataclasses.fields(Flags):
        hint = _without_none(hints[field.name])
        about = field.metadata["help"]
        default = getattr(Flags(), field.name)
        if default is not None:
            about += f" (default: {default})"
        if hint is bool:
            parser.add_argument(
                f"--{field.name}", action=argparse.BooleanOptionalAction, help=about
            )
        else:
            parser.add_argument(f"--{field.name}", type=_reader(hint), help=about)
    for name in REFUSED:
        parser.add_argument(f"--{name}", nargs="?", help=argparse.SUPPRESS)
    return parser


def _parsed(content: object) -> Flags:
    for name in REFUSED if isinstance(content, dict) else ():
        if name in content:
            raise ValueError(f"--{name} must be left out: {REFUSED[name]}")
    flags = parse(content, Flags)
    for field in dataclasses.fields(Flags):
        _check_rule(f"--{field.name}", getattr(flags, field.name), field.metadata["rule"])
    return flags


def _check_rule(name: str, value: Any, rule: str | None) -> None:
    if rule is None or value is None:
        return
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, int) and item >= _MOST:
            raise ValueError(f"{name} must be below 2^63, got {item}")
        if not _RULES[rule](item):
            raise ValueError(f"{name} must be {rule}, got {item}")
    if value == []:
        raise ValueError(f"{name} must have entries, got none")


def _check_together(flags: Flags) -> None:
    num_tables = len(KAGGLE_NUM_EMBEDDINGS)
    sizes = typing.cast(list[int], flags.num_embeddings_per_feature)
    if len(sizes) != num_tables:
        raise ValueError(
            f"--num_embeddings_per_feature must have {num_tables} entries, got {len(sizes)}"
        )
    if flags.tt_tables > num_tables:
        raise ValueError(f"--tt_tables must be 1 to {num_tables}, got {flags.tt_tables}")
    dense, over = flags.dense_arch_layer_sizes, flags.over_arch_layer_sizes
    if dense[-1] != flags.embedding_dim:
        raise ValueError(
            f"--dense_arch_layer_sizes must end in --embedding_dim {flags.embedding_dim}, "
            f"got {dense}"
        )
    if len(over) < 2 or over[-1] != 1:
        raise ValueError(
            f"--over_arch_layer_sizes must have two layers or more and end in 1, got {over}"
        )
    for name in ("interaction_branch1_layer_sizes", "interaction_branch2_layer_sizes"):
        branch = getattr(flags, name)
        if flags.interaction_type == "projection" and branch[-1] % flags.embedding_dim:
            raise ValueError(
                f"--{name} must end in a multiple of --embedding_dim {flags.embedding_dim}, "
                f"got {branch}"
            )
    if flags.lr_decay_steps and flags.lr_decay_start < flags.lr_warmup_steps:
        raise ValueError(
            f"--lr_decay_start must be at least --lr_warmup_steps {flags.lr_warmup_steps}, "
            f"got {flags.lr_decay_start}"
        )
    _check_compression(flags)
    for name, is_given in (("save_every", flags.save_every), ("resume", flags.resume)):
        if is_given and flags.checkpoint_dir is None:
            raise ValueError(f"--{name} must come with --checkpoint_dir")


def _check_compression(flags: Flags) -> None:
    if flags.compression_bytes is not None and flags.compression not in HASHED:
        raise ValueError(
            f"--compression_bytes must come with --compression {', '.join(HASHED)}, "
            f"got {flags.compression}"
        )
    refused = {
        "tt_cache": flags.compression != "tt" and flags.tt_cache is not None,
        "freeze_tt": flags.compression != "tt" and flags.freeze_tt,
        "compare_dense": flags.compression in ("int4", "none") and flags.compare_dense,
    }
    for name, is_refused in refused.items():
        if is_refused:
            raise ValueError(f"--{name} must be left out of --compression {flags.compression}")


def _with_defaults(flags: Flags) -> Flags:
    """Fills in what depends on other flags."""
    changes: dict[str, Any] = {
        "dense_arch_layer_sizes": [512, 256, 64, flags.embedding_dim],
        "num_embeddings_per_feature": (
            list(KAGGLE_NUM_EMBEDDINGS)
            if flags.num_embeddings is None
            else [flags.num_embeddings] * len(KAGGLE_NUM_EMBEDDINGS)
        ),
    }
    changes = {name: value for name, value in changes.items() if getattr(flags, name) is None}
    if flags.in_memory_binary_criteo_path is not None:
        changes["data"] = flags.in_memory_binary_criteo_path
    return dataclasses.replace(flags, **changes)


def _without_none(hint: Any) -> Any:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        (hint,) = [arg for arg in typing.get_args(hint) if arg is not type(None)]
    return hint


def _reader(hint: Any) -> Callable[[str], Any]:
    """Returns what reads a flag's text as its type."""
    if typing.get_origin(hint) is Literal:
        hint = type(typing.get_args(hint)[0])
    if hint == list[int]:
        return lambda text: [_number(part, int) for part in text.split(",")]
    if hint is str:
        return str
    return lambda text: _number(text, hint)


def _number(text: str, kind: type[int] | type[float]) -> int | float:
    try:
        return kind(text)
    except ValueError:
        name = "an integer" if kind is int else "a number"
        raise argparse.ArgumentTypeError(f"must be {name}, got {text}") from None
