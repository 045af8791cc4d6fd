"""Refuses models that TorchRec has sharded, without importing TorchRec."""

import sys

from torch import nn


def check_unsharded(model: nn.Module, *, instead: str) -> None:
    """Raises NotImplementedError for a model with a sharded module; the message ends in `instead`.

    A model that holds one has imported it.
    """
    types = sys.modules.get("torchrec.distributed.types")
    for path, module in model.named_modules():
        if types is not None and isinstance(module, types.ShardedModule):
            raise NotImplementedError(
                f"model must be unsharded, got a {type(module).__name__} at {path!r}: {instead}"
            )
