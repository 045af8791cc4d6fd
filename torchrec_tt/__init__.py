"""Tensor-Train compressed embedding tables for TorchRec.

Names resolve on first use (PEP 562), so importing the package is cheap and never needs TorchRec
or the compiled operators.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchrec_tt.compression import change_ranks as change_ranks
    from torchrec_tt.compression import compress as compress
    from torchrec_tt.compression import materialize as materialize
    from torchrec_tt.compression_config import TTConfig as TTConfig
    from torchrec_tt.distributed.embedding import (
        ShardedTTEmbeddingCollection as ShardedTTEmbeddingCollection,
    )
    from torchrec_tt.distributed.embedding import (
        TTEmbeddingCollectionSharder as TTEmbeddingCollectionSharder,
    )
    from torchrec_tt.distributed.embeddingbag import (
        ShardedTTEmbeddingBagCollection as ShardedTTEmbeddingBagCollection,
    )
    from torchrec_tt.distributed.embeddingbag import (
        TTEmbeddingBagCollectionSharder as TTEmbeddingBagCollectionSharder,
    )
    from torchrec_tt.distributed.planner.planners import tt_planner as tt_planner
    from torchrec_tt.inference import freeze as freeze
    from torchrec_tt.modules.embedding import TTEmbedding as TTEmbedding
    from torchrec_tt.modules.embedding_bag import TTEmbeddingBag as TTEmbeddingBag
    from torchrec_tt.modules.embedding_configs import (
        TTEmbeddingBagConfig as TTEmbeddingBagConfig,
    )
    from torchrec_tt.modules.embedding_configs import TTEmbeddingConfig as TTEmbeddingConfig
    from torchrec_tt.modules.embedding_modules import (
        TTEmbeddingBagCollection as TTEmbeddingBagCollection,
    )
    from torchrec_tt.modules.embedding_modules import (
        TTEmbeddingCollection as TTEmbeddingCollection,
    )
    from torchrec_tt.modules.row_cache_config import RowCacheConfig as RowCacheConfig
    from torchrec_tt.modules.row_ordered import RowOrderedCollection as RowOrderedCollection
    from torchrec_tt.tt.factorize import make_shape as make_shape
    from torchrec_tt.tt.shape import TTShape as TTShape

__version__ = "0.1.0"

_MODULE_OF = {
    "TTConfig": "torchrec_tt.compression_config",
    "change_ranks": "torchrec_tt.compression",
    "compress": "torchrec_tt.compression",
    "materialize": "torchrec_tt.compression",
    "ShardedTTEmbeddingCollection": "torchrec_tt.distributed.embedding",
    "TTEmbeddingCollectionSharder": "torchrec_tt.distributed.embedding",
    "ShardedTTEmbeddingBagCollection": "torchrec_tt.distributed.embeddingbag",
    "TTEmbeddingBagCollectionSharder": "torchrec_tt.distributed.embeddingbag",
    "tt_planner": "torchrec_tt.distributed.planner.planners",
    "freeze": "torchrec_tt.inference",
    "TTEmbedding": "torchrec_tt.modules.embedding",
    "TTEmbeddingBag": "torchrec_tt.modules.embedding_bag",
    "TTEmbeddingBagConfig": "torchrec_tt.modules.embedding_configs",
    "TTEmbeddingConfig": "torchrec_tt.modules.embedding_configs",
    "TTEmbeddingBagCollection": "torchrec_tt.modules.embedding_modules",
    "TTEmbeddingCollection": "torchrec_tt.modules.embedding_modules",
    "RowCacheConfig": "torchrec_tt.modules.row_cache_config",
    "RowOrderedCollection": "torchrec_tt.modules.row_ordered",
    "make_shape": "torchrec_tt.tt.factorize",
    "TTShape": "torchrec_tt.tt.shape",
}

__all__ = list(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'torchrec_tt' has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULE_OF])
