"""Freezes TorchRec's DLRM with TT tables, and packages it for C++ with AOTInductor.

    python examples/serving/export_model.py --output_dir runs/serving

Writes `model.pt2`, the package; `exported.pt2`, the program that `torch.export.load` reads; and
batches of B samples with the frozen model's outputs, `inputs_B.pt` and `expected_B.pt`, to check
`serve.cpp` with. The model is not trained: load your state dict where `make_model` ends.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torchrec.models.dlrm import DLRM
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_tt import TTEmbeddingBagCollection, TTEmbeddingBagConfig, freeze

KEYS = ["item", "user", "ad"]
NUM_EMBEDDINGS = {"item": 1_000_000, "user": 200_000, "ad": 50}
DENSE_FEATURES = 4


class ServedModel(nn.Module):
    """The model as torch.export takes it: tensors in, a tensor out."""

    def __init__(self, dlrm: nn.Module) -> None:
        super().__init__()
        self.dlrm = dlrm

    def forward(
        self,
        dense: Tensor,  # [B, DENSE_FEATURES]
        ids: Tensor,  # [N] int64: every bag of the first key, then those of the next
        lengths: Tensor,  # [keys * B] int64: of the bags
    ) -> Tensor:  # [B, 1] probabilities
        sparse = KeyedJaggedTensor(keys=KEYS, values=ids, lengths=lengths)
        return self.dlrm(dense, sparse).sigmoid()


def make_model() -> DLRM:
    configs = []
    for key, size in NUM_EMBEDDINGS.items():
        table = {"name": f"t_{key}", "num_embeddings": size, "embedding_dim": 16}
        if size > 1000:
            config = TTEmbeddingBagConfig(feature_names=[key], tt_ranks=[16, 16], **table)
        else:
            config = EmbeddingBagConfig(feature_names=[key], **table)
        configs.append(config)
    return DLRM(
        embedding_bag_collection=TTEmbeddingBagCollection(configs),
        dense_in_features=DENSE_FEATURES,
        dense_arch_layer_sizes=[16, 16],
        over_arch_layer_sizes=[16, 1],
    )


def make_batch(batch_size: int) -> tuple[Tensor, Tensor, Tensor]:
    lengths = torch.randint(0, 4, (len(KEYS), batch_size))
    counts = lengths.sum(dim=1).tolist()
    ids = [torch.randint(0, NUM_EMBEDDINGS[key], (n,)) for key, n in zip(KEYS, counts, strict=True)]
    return torch.rand(batch_size, DENSE_FEATURES), torch.cat(ids), lengths.flatten()


def export(model: nn.Module) -> ExportedProgram:
    """Returns the program of a frozen model, for batches of any size, those of one bag too.

    torch.export takes it for granted that a size that may change is not 1, unless it is told so.
    """
    any_size = {0: Dim.AUTO}
    with torch.no_grad(), torch.fx.experimental._config.patch(backed_size_oblivious=True):
        return torch.export.export(
            ServedModel(model), make_batch(8), dynamic_shapes=(any_size, any_size, any_size)
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "int8"], default="int8")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.output_dir.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)
    frozen = freeze(make_model(), args.dtype, hot_rows={"t_item": torch.arange(1000)})
    program = export(frozen)
    torch.export.save(program, args.output_dir / "exported.pt2")
    torch._inductor.aoti_compile_and_package(
        program, package_path=str(args.output_dir / "model.pt2")
    )
    for batch_size in (5, 1):  # other sizes than it was exported with
        inputs = make_batch(batch_size)
        torch.save(list(inputs), args.output_dir / f"inputs_{batch_size}.pt")
        with torch.no_grad():
            output = ServedModel(frozen)(*inputs)
        torch.save(output, args.output_dir / f"expected_{batch_size}.pt")


if __name__ == "__main__":
    main()
