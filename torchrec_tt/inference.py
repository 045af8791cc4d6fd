"""freeze: a model with TT tables made ready to serve."""

import copy
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from torchrec_tt.modules.cores import TTCores
from torchrec_tt.modules.embedding import TTEmbedding
from torchrec_tt.modules.embedding_bag import TTEmbeddingBag
from torchrec_tt.modules.frozen_tables import FrozenTable, FrozenTTEmbedding, FrozenTTEmbeddingBag
from torchrec_tt.modules.row_folding import CoreRows
from torchrec_tt.modules.unsharded import check_unsharded
from torchrec_tt.ops.lookup import TTTable
from torchrec_tt.ops.row_counter import place_rows
from torchrec_tt.tt.quantization import quantize_core
from torchrec_tt.tt.row_cache import num_slots

FrozenDType = Literal["float32", "bfloat16", "int8"]
_FROZEN: dict[type, type[FrozenTable]] = {
    TTEmbeddingBag: FrozenTTEmbeddingBag,
    TTEmbedding: FrozenTTEmbedding,
}
_FULL = 0.9  # of the slots that hot rows get: two sets of 8 to choose from fill so far


def freeze(
    model: nn.Module,
    dtype: FrozenDType = "bfloat16",
    *,
    hot_rows: Mapping[str, Tensor] | Tensor | None = None,
) -> nn.Module:
    """Returns a copy of `model` for inference: small read-only TT tables, nothing that trains.

    Every TT table becomes a frozen one, wherever in the model it is: a TTEmbeddingBag, TTEmbedding,
    TTEmbeddingBagCollection or TTEmbeddingCollection, or a module that holds some, such as
    TorchRec's DLRM. The copy has no gradients, optimizers or counters and is in the mode of
    evaluation; regular tables and layers are copied as they are. `model` is left as it was.

    Rows of a row cache stay hot rows, with the values that they learned. They and the rows that
    `hot_rows` asks for are kept as rows, exact but for their dtype, and are not computed.

    Args:
        model: unsharded, on the CPU or CUDA.
        dtype: of the cores: "float32", "bfloat16", or "int8", on the CPU only, a scale for each
            slice (`torchrec_tt.tt.quantization`). Hot rows are float32 with "float32" cores, else
            bfloat16. Sums and outputs are float32.
        hot_rows: ids of rows to keep as rows, [H] int32 or int64, by the table's name in its
            collection, or by the path of a module of one table in `model`; for such a module alone,
            the ids. None: those of row caches only.

    Raises:
        ValueError: for an unknown dtype, a model without TT tables, on "meta" or wrapped, cores or
            rows that are not finite, tables in `hot_rows` that are not there, ids out of range.
        NotImplementedError: for a sharded model, subclasses of the four, and "int8" on CUDA.

    Example:
        >>> bag = TTEmbeddingBag(1_000_000, 64, tt_ranks=[16, 16], mode="sum")
        >>> frozen = freeze(bag, "int8", hot_rows=torch.arange(1000))
        >>> frozen(torch.tensor([1, 2, 999_999]), torch.tensor([0, 2])).shape
        torch.Size([2, 64])
    """
    if dtype not in get_args(FrozenDType):
        raise ValueError(f"dtype must be one of {get_args(FrozenDType)}, got {dtype!r}")
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    _check_model(model)
    tables = dict(_tables(model))
    if not tables:
        raise ValueError(f"model must hold TT tables, got a {type(model).__name__} without one")
    hot_ids = _hot_ids(hot_rows, tables)
    frozen = {
        id(table): _frozen(table, name, dtype=dtype, hot_ids=hot_ids.get(name))
        for name, table in tables.items()
    }
    for module in model.modules():
        if _is_collection(module):
            from torchrec_tt.modules.frozen_collections import frozen_collection

            own = {
                name: frozen[id(table)]
                for name, table in module.table_modules().items()
                if id(table) in frozen
            }
            frozen[id(module)] = frozen_collection(module, own)
    copied = copy.deepcopy(model, memo=frozen).eval().requires_grad_(False)
    for parameter in copied.parameters():
        parameter.grad = None
    return copied


def _tables(model: nn.Module) -> Iterator[tuple[str, TTCores]]:
    """Every TT table once, by its name in its collection, else its path in the model."""
    seen: set[int] = set()
    names: set[str] = set()
    collections = [m for m in model.modules() if _is_collection(m)]
    named = [(n, t) for c in collections for n, t in c.table_modules().items()]
    for name, module in [*named, *model.named_modules()]:
        if isinstance(module, TTCores) and id(module) not in seen:
            if name in names:
                raise NotImplementedError(
                    f"model must have one TT table of a name, got two of {name!r}: freeze their "
                    "collections one by one"
                )
            seen.add(id(module))
            names.add(name)
            yield name, module


def _is_collection(module: nn.Module) -> bool:
    """A model that holds one has imported it."""
    loaded = sys.modules.get("torchrec_tt.modules.embedding_modules")
    return loaded is not None and isinstance(module, loaded.TTCollection)


def _check_model(model: nn.Module) -> None:
    check_unsharded(
        model,
        instead="gather its state dict into a model that was made without "
        "DistributedModelParallel, and freeze that (docs/serving.md)",
    )
    for path, module in model.named_modules():
        where = f"got a {type(module).__name__} at {path!r}" if path else "got one"
        if isinstance(module, DistributedDataParallel):
            raise ValueError(
                f"model must not be wrapped in DistributedDataParallel, {where}: freeze its .module"
            )
        if isinstance(module, FrozenTable):
            raise ValueError(f"model must not be frozen yet, {where}: freeze the trained model")
        if isinstance(module, TTCores) and type(module) not in _FROZEN:
            raise NotImplementedError(
                f"model must hold {[kind.__name__ for kind in _FROZEN]} themselves, {where}: what "
                "a subclass adds would be lost"
            )


def _hot_ids(
    hot_rows: Mapping[str, Tensor] | Tensor | None, tables: Mapping[str, TTCores]
) -> dict[str, Tensor]:
    if hot_rows is None:
        return {}
    if isinstance(hot_rows, Tensor):
        if list(tables) != [""]:
            raise ValueError(
                f"hot_rows must give ids by table for a model with the tables {list(tables)}, "
                "got a tensor"
            )
        hot_rows = {"": hot_rows}
    if not isinstance(hot_rows, Mapping):
        raise ValueError(
            f"hot_rows must be ids or a mapping from tables to ids, got {type(hot_rows).__name__}"
        )
    for name, ids in hot_rows.items():
        if name not in tables:
            raise ValueError(f"hot_rows must be of the TT tables {list(tables)}, got {name!r}")
        _check_ids(ids, name=name, num_embeddings=tables[name].num_embeddings)
    return dict(hot_rows)


def _check_ids(ids: Any, *, name: str, num_embeddings: int) -> None:
    is_right = (
        isinstance(ids, Tensor) and ids.dim() == 1 and ids.dtype in (torch.int32, torch.int64)
    )
    if is_right and (ids.is_meta or ids.layout != torch.strided):
        got = "meta" if ids.is_meta else ids.layout
        raise ValueError(f"hot_rows must be dense with values for table {name!r}, got {got}")
    if not is_right:
        got = f"{ids.dtype} {tuple(ids.shape)}" if isinstance(ids, Tensor) else repr(ids)
        raise ValueError(f"hot_rows must be ids [H] int32 or int64 for table {name!r}, got {got}")
    bad = ids[(ids < 0) | (ids >= num_embeddings)]
    if len(bad):
        raise ValueError(
            f"hot_rows must be in [0, {num_embeddings}) for table {name!r}, got {int(bad[0])}"
        )


@torch.no_grad()
def _frozen(
    table: TTCores, name: str, *, dtype: FrozenDType, hot_ids: Tensor | None
) -> FrozenTable:
    cores = list(table.tt_cores)
    _check_cores(cores, name=name, dtype=dtype)
    ids, values = _hot_values(table, name, hot_ids)
    slots, rows = _placed(ids, values)
    narrow = torch.float32 if dtype == "float32" else torch.bfloat16
    state = {
        "cores": [
            quantize_core(core) if dtype == "int8" else core.detach().to(narrow, copy=True)
            for core in cores
        ],
        "hot_ids": slots,
        "hot_rows": rows.to(narrow),
    }
    return _FROZEN[type(table)](table, **state)


def _check_cores(cores: list[Tensor], *, name: str, dtype: FrozenDType) -> None:
    device = cores[0].device
    if device.type == "meta":
        raise ValueError(f"model must have values, got table {name!r} on meta")
    if dtype == "int8" and device.type != "cpu":
        raise NotImplementedError(
            f"dtype 'int8' must be for the CPU, got table {name!r} on {device}: use 'bfloat16'"
        )
    for k, core in enumerate(cores):
        bad = (~core.isfinite()).nonzero()
        if len(bad):
            i, j = bad[0].tolist()
            raise ValueError(
                f"tt_cores.{k} must be finite for table {name!r}, got {core[i, j].item()} in "
                f"row {i}"
            )


def _hot_values(
    table: TTCores, name: str, hot_ids: Tensor | None
) -> tuple[Tensor, Tensor]:  # [H] int64, [H, D] float32
    """Cached rows as they were trained, others that are asked for as the cores give them."""
    device = table.tt_cores[0].device
    ids = torch.empty(0, dtype=torch.int64, device=device)
    values = torch.empty(0, table.embedding_dim, device=device)
    cache = getattr(table, "row_cache", None)
    if cache is not None:
        is_taken = cache.ids >= 0
        ids, values = cache.ids[is_taken], cache.rows[is_taken].float()
        if not values.isfinite().all():
            bad = int(ids[(~values.isfinite()).any(1)][0])
            raise ValueError(f"cached rows must be finite for table {name!r}, got row {bad}")
    if hot_ids is not None:
        asked = hot_ids.to(device, torch.int64).unique()
        asked = asked[~torch.isin(asked, ids)]
        rows = CoreRows(TTTable(name=name, shape=table.shape), asked)
        computed = rows.values([core.detach().float() for core in table.tt_cores])
        ids, values = torch.cat([ids, asked]), torch.cat([values, computed])
    return ids, values


def _placed(ids: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:  # [C] int64, [C, D]
    """Rows in slots where lookups find them, of the fewest sets that take them all."""
    wanted = ids.cpu()
    slots = num_slots(int(len(wanted) / _FULL))
    while True:
        tags = torch.full([slots], -1)
        cells = torch.full([num_slots(len(wanted))], -1)
        cells[: len(wanted)] = wanted
        place_rows(
            tags,
            torch.zeros(slots),
            cells,
            torch.ones(len(cells)),
            ratio=1.0,
            margin=0.0,
        )
        if not (cells >= 0).any():
            break
        slots = num_slots(slots + slots // 8 + 1)
    order = torch.argsort(wanted)
    is_taken = tags >= 0
    places = order[torch.searchsorted(wanted[order], tags[is_taken])]
    rows = values.new_zeros(slots, values.shape[1])
    rows[is_taken.to(rows.device)] = values[places.to(values.device)]
    return tags.to(ids.device), rows
