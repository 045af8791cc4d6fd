"""What Tensor-Train (TT) tables are compared with: fewer bytes by hashing or by fewer bits.

Each is plain TorchRec: ids are mapped to ids of smaller tables, an ordinary EmbeddingBagCollection
looks these up and its optimizer trains them, and their rows are joined to the columns' rows.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from torchrec_tt import TTEmbeddingBagConfig

Compression = Literal["tt", "hash", "qr", "robe", "int4", "none"]
HASHED = ("hash", "qr", "robe")  # trained in smaller tables

_FLOAT_BYTES = 4
_CHUNK = 8  # numbers that ROBE's hash finds together
_PRIME = 2**31 - 1
_QUANTIZED_ROWS = 1 << 16  # at a time


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A feature of a small table: id `(a * id + b) % prime // divisor % modulus` for each id."""

    feature: str
    modulus: int
    divisor: int = 1
    hashing: tuple[int, int] | None = None  # a and b; None leaves the id as it is

    def __call__(self, ids: Tensor) -> Tensor:  # [B] both
        if self.hashing is not None:
            a, b = self.hashing
            ids = (a * ids + b) % _PRIME
        return ids // self.divisor % self.modulus


@dataclass(frozen=True, kw_only=True, slots=True)
class Hashed:
    """Smaller tables in place of a model's TT tables.

    Attributes:
        columns: the model's tables, as they are looked up.
        tables: as they are stored.
        parts: of each column, in the columns' order.
        is_product: whether a column's row is the product of its parts' rows, else they are chained.
    """

    columns: list[EmbeddingBagConfig]
    tables: list[EmbeddingBagConfig]
    parts: list[list[Part]]
    is_product: bool


class HashedEmbeddingBagCollection(nn.Module):
    """Looks columns up in smaller tables; one id a column."""

    def __init__(self, hashed: Hashed) -> None:
        super().__init__()
        self._configs = hashed.columns
        self.map_ids = _MapIds(hashed.parts)
        self.stored = EmbeddingBagCollection(tables=hashed.tables, device="meta")
        self.join_rows = _JoinRows(hashed)

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        return self.join_rows(self.stored(self.map_ids(features)))

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Returns the columns' tables, as a DLRM asks for them."""
        return self._configs


class _MapIds(nn.Module):
    def __init__(self, parts: list[list[Part]]) -> None:
        super().__init__()
        self._parts = parts

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        columns = features.values().reshape(len(self._parts), -1)  # [26, B]
        parts = [(part, ids) for ids, of in zip(columns, self._parts, strict=True) for part in of]
        values = torch.cat([part(ids) for part, ids in parts])
        return KeyedJaggedTensor(
            keys=[part.feature for part, _ in parts],
            values=values,
            lengths=torch.ones(len(values), dtype=torch.int32),
        )


class _JoinRows(nn.Module):
    def __init__(self, hashed: Hashed) -> None:
        super().__init__()
        self._hashed = hashed

    def forward(self, rows: KeyedTensor) -> KeyedTensor:
        columns = []
        for parts in self._hashed.parts:
            of = [rows[part.feature] for part in parts]
            columns.append(math.prod(of[1:], start=of[0]) if self._hashed.is_product else of)
        flat = [t for c in columns for t in (c if isinstance(c, list) else [c])]
        configs = self._hashed.columns
        return KeyedTensor(
            keys=[config.feature_names[0] for config in configs],
            length_per_key=[config.embedding_dim for config in configs],
            values=torch.cat(flat, dim=1),
        )


def hashed_tables(
    configs: Sequence[EmbeddingBagConfig],
    *,
    method: Compression,
    num_bytes: int | None = None,
    seed: int = 0,
) -> Hashed:
    """Returns smaller tables in place of the TT tables among `configs`.

    "hash" keeps fewer rows, by the id modulo their number. "qr" multiplies a row of the quotient
    and one of the remainder, drawn from U(1 / sqrt(N), 1) as in the reference. "robe" keeps one
    array for all of them, from which a hash of table, id and place takes 8 numbers at a time; it
    is ROBE but for its chunks, which do not overlap.

    Args:
        configs: of the model.
        method: one of `HASHED`.
        num_bytes: of all that replaces TT tables; None is what the TT tables have. Tables share it
            as they do theirs.
        seed: of ROBE's hash.

    Raises:
        ValueError: if the bytes are too few.

    Reference:
        Shi, Mudigere, Naumov, Yang, "Compositional Embeddings Using Complementary Partitions for
        Memory-Efficient Recommendation Systems", KDD 2020 (QR; facebookresearch/dlrm, qr_emb).
        Desai, Chou, Shrivastava, "Random Offset Block Embedding (ROBE) for Compressed Embedding
        Tables in Deep Learning Recommendation Systems", MLSys 2022.
    """
    tt = [config for config in configs if isinstance(config, TTEmbeddingBagConfig)]
    tt_bytes = sum(config.tt_shape.num_parameters for config in tt) * _FLOAT_BYTES
    share = 1.0 if num_bytes is None else num_bytes / tt_bytes
    tables: list[EmbeddingBagConfig] = []
    parts: list[list[Part]] = []
    if method == "robe":
        num_chunks = int(tt_bytes * share / _FLOAT_BYTES / _CHUNK)
        random = torch.Generator().manual_seed(seed)
    for config in configs:
        name, rows, dim = config.name, config.num_embeddings, config.embedding_dim
        if not isinstance(config, TTEmbeddingBagConfig):
            tables.append(config)
            parts.append([Part(feature=config.feature_names[0], modulus=rows)])
            continue
        num_rows = int(config.tt_shape.num_parameters * share / dim)
        if method == "hash":
            of, own = _fewer_rows(name, dim, min(num_rows, rows))
        elif method == "qr":
            of, own = _quotient_remainder(name, dim, num_rows, num_embeddings=rows)
        else:
            if num_chunks < 1 or dim % _CHUNK:
                raise ValueError(
                    f"robe needs {_CHUNK * _FLOAT_BYTES} bytes and dimensions that are multiples "
                    f"of {_CHUNK}, got --compression_bytes {num_bytes} and {dim}"
                )
            of, own = [], _chunks(name, dim, num_chunks, random)
        tables += of
        parts.append(own)
    if method == "robe":
        features = [part.feature for own in parts for part in own if part.hashing is not None]
        tables.append(_table("t_robe", num_chunks, _CHUNK, features))
    return Hashed(columns=list(configs), tables=tables, parts=parts, is_product=method == "qr")


def _fewer_rows(name: str, dim: int, num_rows: int) -> tuple[list[EmbeddingBagConfig], list[Part]]:
    if num_rows < 1:
        raise ValueError(f"--compression_bytes must give {name} a row of dim {dim}, got none")
    return [_table(name, num_rows, dim, [name])], [Part(feature=name, modulus=num_rows)]


def _quotient_remainder(
    name: str, dim: int, num_rows: int, *, num_embeddings: int
) -> tuple[list[EmbeddingBagConfig], list[Part]]:
    """As many remainders as leave room for the quotients."""
    room = num_rows * num_rows - 4 * num_embeddings
    if room < 0:
        raise ValueError(
            f"--compression_bytes must give {name} {2 * math.isqrt(num_embeddings) + 2} rows for "
            f"quotients and remainders, got {num_rows}"
        )
    remainders = min((num_rows + math.isqrt(room)) // 2, num_embeddings)
    while remainders > 1 and remainders + -(-num_embeddings // remainders) > num_rows:
        remainders -= 1
    quotients = -(-num_embeddings // remainders)
    low = 1 / math.sqrt(num_embeddings)
    sizes = {f"{name}_quotient": quotients, f"{name}_remainder": remainders}
    tables = [_table(key, size, dim, [key], low=low, high=1.0) for key, size in sizes.items()]
    return tables, [
        Part(feature=f"{name}_quotient", modulus=quotients, divisor=remainders),
        Part(feature=f"{name}_remainder", modulus=remainders),
    ]


def _chunks(name: str, dim: int, num_chunks: int, random: torch.Generator) -> list[Part]:
    draws = torch.randint(1, _PRIME, (dim // _CHUNK, 2), generator=random).tolist()
    return [
        Part(feature=f"{name}_{k}", modulus=num_chunks, hashing=(a, b))
        for k, (a, b) in enumerate(draws)
    ]


def _table(
    name: str,
    num_embeddings: int,
    dim: int,
    features: list[str],
    *,
    low: float | None = None,
    high: float | None = None,
) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(
        name=name,
        num_embeddings=num_embeddings,
        embedding_dim=dim,
        feature_names=features,
        weight_init_min=low,
        weight_init_max=high,
    )


def int4_bytes(config: EmbeddingBagConfig) -> int:
    """Returns the bytes of a table in FBGEMM's INT4 rows: 4 bits a number, scale and bias."""
    return config.num_embeddings * (-(-config.embedding_dim // 2) + 2 * 2)


@torch.no_grad()
def quantize_int4_(weight: Tensor) -> None:  # [num_embeddings, D]
    """Rounds a trained table in place to what FBGEMM's INT4 rows hold of it."""
    for rows in weight.split(_QUANTIZED_ROWS):
        packed = torch.ops.fbgemm.FloatToFusedNBitRowwiseQuantizedSBHalf(rows.contiguous(), 4)
        rows.copy_(torch.ops.fbgemm.FusedNBitRowwiseQuantizedSBHalfToFloat(packed, 4))
