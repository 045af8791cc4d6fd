"""Stock pipelines drive a sharded model with Tensor-Train tables as a plain loop does.

TorchRec's prefetching and fused pipelines want CUDA streams. Their subclasses here do the same
steps in the same order without streams, so that the CPU can run them.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torchrec.distributed.train_pipeline import (
    EvalPipelineSparseDist,
    PrefetchTrainPipelineSparseDist,
    StagedTrainPipeline,
    TrainPipelineBase,
    TrainPipelineSparseDist,
)
from torchrec.distributed.train_pipeline.pipeline_stage import PipelineStage, SparseDataDistUtil
from torchrec.distributed.train_pipeline.runtime_forwards import InSyncEmbeddingPipelinedForward
from torchrec.distributed.train_pipeline.train_pipelines import (
    TorchCompileConfig,
    TrainPipelineFusedSparseDist,
    TrainPipelinePT2,
    TrainPipelineSemiSync,
    TrainPipelineSparseDistLite,
)
from torchrec.distributed.types import ShardingType
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.distributed.ranks import Ranks
from tests.distributed.toy_model import (
    BATCH_SIZE,
    ToyModelWithLoss,
    batches,
    full_state,
    kjt,
    sharded,
    unsharded,
)
from torchrec_tt import RowCacheConfig, TTEmbeddingBagCollection
from torchrec_tt.modules.row_caches import RowCaches

TW = ShardingType.TABLE_WISE.value
RW = ShardingType.ROW_WISE.value
DP = ShardingType.DATA_PARALLEL.value
CPU = torch.device("cpu")

needs_torchrec_1_7 = pytest.mark.skipif(
    "context" not in PrefetchTrainPipelineSparseDist._prefetch.__annotations__,
    reason="until torchrec 1.7 the pipeline keeps one context for all batches",
)


class PrefetchOnCpu(PrefetchTrainPipelineSparseDist):
    def _prefetch(self, context: Any) -> None:
        for module in self._pipelined_modules:
            name = module.forward.name
            features = context.input_dist_tensors_requests.pop(name).wait()
            module_context = context.module_contexts.pop(name)
            module.prefetch(ctx=module_context, dist_input=features)
            context.module_input_post_prefetch[name] = features
            context.module_contexts_post_prefetch[name] = module_context


class InSyncForwardOnCpu(InSyncEmbeddingPipelinedForward):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._device = CPU


class FusedOnCpu(TrainPipelineFusedSparseDist):
    _pipelined_forward_type = InSyncForwardOnCpu

    def start_embedding_lookup(self, batch: Any, context: Any) -> None:
        for module in self._pipelined_modules:
            name = module.forward.name
            features = context.input_dist_tensors_requests[name].wait()
            context.embedding_a2a_requests[name] = module.compute_and_output_dist(
                context.module_contexts[name], features
            )


class DataDistOnCpu(SparseDataDistUtil):
    """Distributes a batch and, if `ahead` is a stage's name, does that for it too."""

    def __init__(self, model: Any, ahead: str | None) -> None:
        stream = SimpleNamespace(device=CPU)
        super().__init__(model, stream, **({f"{ahead}_stream": stream} if ahead else {}))
        self.data_dist_stream = None
        if ahead == "embedding_lookup":
            self._pipelined_forward = InSyncForwardOnCpu

    def prefetch(self, batch: Any) -> Any:
        PrefetchOnCpu._prefetch(self, self._prefetch_context())
        return batch

    def start_embedding_lookup(self, batch: Any) -> Any:
        FusedOnCpu.start_embedding_lookup(self, batch, self._embedding_lookup_context())
        return batch


class StagedOnCpu(StagedTrainPipeline):
    """With the step that it leaves to its user."""

    def __init__(self, model: Any, optimizer: Any, device: torch.device, ahead: Any = None) -> None:
        self._data_dist, self._optimizer = DataDistOnCpu(model, ahead), optimizer
        stream, data_dist = SimpleNamespace(device=device), self._data_dist
        runnables = [lambda batch: batch.to(device), data_dist.start_sparse_data_dist]
        if ahead:
            names = {"prefetch": "prefetch", "embedding_lookup": "start_embedding_lookup"}
            runnables.append(getattr(data_dist, names[ahead]))
        stages = [PipelineStage(r.__name__, r, stream) for r in runnables]
        stages[1].fill_callback = data_dist.wait_sdd_fill_callback
        super().__init__(stages, compute_stream=stream)

    @property
    def _pipelined_modules(self) -> list[Any]:
        return self._data_dist._pipelined_modules

    def _run_with_event(self, runnable: Any, event: None, inputs: Any, stream: Any) -> Any:
        return runnable(inputs), None

    def progress(self, dataloader_iter: Iterator[Any]) -> Tensor:
        batch = super().progress(dataloader_iter)
        if batch is None:
            raise StopIteration
        self._optimizer.zero_grad()
        loss, output = self._data_dist.model(batch)
        loss.backward()
        self._optimizer.step()
        return output


StagedPrefetchOnCpu = functools.partial(StagedOnCpu, ahead="prefetch")
StagedLookupOnCpu = functools.partial(StagedOnCpu, ahead="embedding_lookup")


class SemiSyncOnCpu(TrainPipelineSemiSync):
    copy_batch_to_gpu = TrainPipelineSparseDist.copy_batch_to_gpu
    start_sparse_data_dist = TrainPipelineSparseDist.start_sparse_data_dist

    def start_embedding_lookup(self, batch: Any, context: Any) -> None:
        """Leaves the lookup out, which a refused pipeline never reaches."""


def compiling_pipeline(*args: Any) -> TrainPipelinePT2:
    torch.compiler.reset()
    return TrainPipelinePT2(
        *args, compile_configs=TorchCompileConfig(backend="aot_eager", compile_on_iter=1)
    )


def local_batches(rank: int, num: int) -> list[KeyedJaggedTensor]:
    start = rank * BATCH_SIZE
    return [
        kjt(batch, start=start, stop=start + BATCH_SIZE)
        for batch in batches(num, size=2 * BATCH_SIZE)
    ]


def plain_and_piped(
    types: Mapping[str, str], *, caches: Mapping[str, RowCacheConfig] | None = None
) -> tuple[Any, Any, Any, Any]:
    """Two models with the same values, each with its optimizer; the second returns its loss."""
    source = unsharded(caches=caches)
    with_loss = ToyModelWithLoss(source.ebc)
    with_loss.over = source.over
    return (
        *sharded(source, types, optimizer="adagrad"),
        *sharded(with_loss, types, optimizer="adagrad"),
    )


def plain_step(model: Any, optimizer: Any, features: KeyedJaggedTensor) -> Tensor:
    optimizer.zero_grad()
    output = model(features)
    output.square().mean().backward()
    optimizer.step()
    return output


def assert_same_state(model: Any, expected: Any) -> None:
    expected_state = full_state(expected.state_dict())
    for key, value in full_state(model.state_dict()).items():
        torch.testing.assert_close(value, expected_state[key], rtol=1e-6, atol=1e-6, msg=key)


def train_with_and_without(
    rank: int,
    pipeline_type: Callable[..., Any],
    types: Mapping[str, str],
    caches: Mapping[str, RowCacheConfig] | None = None,
) -> int:
    """Compares 5 steps with and without a pipeline; returns how many modules were pipelined."""
    plain, plain_optimizer, piped, piped_optimizer = plain_and_piped(types, caches=caches)
    with torch._dynamo.config.patch(skip_torchrec=True):  # as it was, for the next test
        pipeline = pipeline_type(piped, piped_optimizer, CPU)
        data = local_batches(rank, 5)
        iterator = iter(data)
        for features in data:
            output = pipeline.progress(iterator)
            expected = plain_step(plain, plain_optimizer, features)
            torch.testing.assert_close(output, expected, rtol=1e-6, atol=1e-6)
    with pytest.raises(StopIteration):
        pipeline.progress(iterator)
    assert_same_state(piped, plain)
    return len(getattr(pipeline, "_pipelined_modules", []))


# U49
@pytest.mark.slow
@pytest.mark.parametrize(
    ("pipeline_type", "types", "num_pipelined"),
    [
        (TrainPipelineBase, {"t0": TW, "t1": RW}, 0),
        (TrainPipelineSparseDist, {"t0": TW, "t1": RW}, 1),
        (TrainPipelineSparseDist, {"t0": DP, "t1": TW}, 1),
        (TrainPipelineSparseDist, {"t0": RW, "t1": DP, "r0": RW}, 1),
        (TrainPipelineSparseDistLite, {"t0": RW, "t1": DP}, 1),
        pytest.param(PrefetchOnCpu, {"t0": TW, "t1": RW}, 1, marks=needs_torchrec_1_7),
        pytest.param(PrefetchOnCpu, {"t0": RW, "t1": DP}, 1, marks=needs_torchrec_1_7),
        (FusedOnCpu, {"t0": TW, "t1": RW}, 1),
        (StagedOnCpu, {"t0": TW, "t1": RW}, 1),
        (StagedPrefetchOnCpu, {"t0": RW, "t1": DP}, 1),
        (compiling_pipeline, {"t0": TW, "t1": RW}, 0),
    ],
)
def test_pipelined_training_equals_unpipelined(
    two_ranks: Ranks,
    pipeline_type: Callable[..., Any],
    types: Mapping[str, str],
    num_pipelined: int,
) -> None:
    assert two_ranks.run(train_with_and_without, pipeline_type, types) == [num_pipelined] * 2


# U52: what is prefetched meanwhile is another batch's.
@pytest.mark.slow
@pytest.mark.parametrize(
    "pipeline_type",
    [
        TrainPipelineSparseDist,
        pytest.param(PrefetchOnCpu, marks=needs_torchrec_1_7),
        FusedOnCpu,
        StagedPrefetchOnCpu,
        compiling_pipeline,
    ],
)
def test_u52_pipelined_training_with_row_caches_equals_unpipelined(
    two_ranks: Ranks, pipeline_type: Callable[..., Any]
) -> None:
    cache = RowCacheConfig(num_rows=16, first_refresh=1, refresh_growth=1)
    types, caches = {"t0": TW, "t1": RW}, {"t0": cache, "t1": cache}
    pipelined = two_ranks.run(train_with_and_without, pipeline_type, types, caches)
    assert pipelined == [int(pipeline_type is not compiling_pipeline)] * 2


def train_on_tags_found_ahead(rank: int) -> list[bool]:
    """Which of the lookups of 5 steps found their tags looked up."""
    found = []
    take_ahead = RowCaches._take_ahead

    def noted(self: RowCaches, indices: Tensor, offsets: Tensor) -> list[Tensor] | None:
        taken = take_ahead(self, indices, offsets)
        found.append(taken is not None)
        return taken

    cache = RowCacheConfig(num_rows=16, first_refresh=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RowCaches, "_take_ahead", noted)
        types = {"t0": TW, "t1": RW}
        train_with_and_without(rank, PrefetchOnCpu, types, {"t0": cache, "t1": cache})
    return found


@pytest.mark.slow
@needs_torchrec_1_7
def test_a_prefetching_pipeline_looks_tags_up_ahead(two_ranks: Ranks) -> None:
    for found in two_ranks.run(train_on_tags_found_ahead):
        assert len(found) >= 5
        assert found.count(False) <= len(found) // 5  # those planned before the refresh


def evaluate_with_and_without(rank: int) -> None:
    plain, _, piped, optimizer = plain_and_piped({"t0": TW, "t1": RW})
    piped.eval()
    pipeline = EvalPipelineSparseDist(piped, optimizer, CPU)
    data = local_batches(rank, 3)
    iterator = iter(data)
    for features in data:
        with torch.no_grad():
            output = pipeline.progress(iterator)
            torch.testing.assert_close(output, plain(features), rtol=0, atol=0)
    assert_same_state(piped, plain)


# U49
@pytest.mark.slow
def test_pipelined_evaluation_equals_unpipelined_and_leaves_the_cores(two_ranks: Ranks) -> None:
    two_ranks.run(evaluate_with_and_without)


def detach_and_attach(rank: int) -> None:
    plain, plain_optimizer, piped, piped_optimizer = plain_and_piped({"t0": TW, "t1": RW})
    pipeline = TrainPipelineSparseDist(piped, piped_optimizer, CPU)
    data = local_batches(rank, 6)
    iterator = iter(data)
    for features in data[:2]:
        pipeline.progress(iterator)
        plain_step(plain, plain_optimizer, features)
    model = pipeline.detach()
    with torch.no_grad():  # an evaluation in between
        _, output = model(data[0])
        torch.testing.assert_close(output, plain(data[0]), rtol=1e-6, atol=1e-6)
    for features in data[2:]:
        output = pipeline.progress(iterator)
        expected = plain_step(plain, plain_optimizer, features)
        torch.testing.assert_close(output, expected, rtol=1e-6, atol=1e-6)
    assert_same_state(piped, plain)


# U49
@pytest.mark.slow
def test_a_detached_model_evaluates_and_its_pipeline_goes_on(two_ranks: Ranks) -> None:
    two_ranks.run(detach_and_attach)


def start_semi_sync(rank: int, has_tt_table: bool) -> str:
    if has_tt_table:
        _, _, piped, optimizer = plain_and_piped({"t0": TW, "t1": DP})
    else:
        tables = [
            EmbeddingBagConfig(
                name=name, num_embeddings=119, embedding_dim=16, feature_names=[feature]
            )
            for name, feature in (("r0", "f0"), ("r1", "f2"))
        ]
        model = ToyModelWithLoss(TTEmbeddingBagCollection(tables))
        piped, optimizer = sharded(model, {}, load=False)
    pipeline = SemiSyncOnCpu(piped, optimizer, CPU)
    try:
        pipeline.fill_pipeline(iter(local_batches(rank, 4)))
    except NotImplementedError as error:
        return str(error)
    return "started"


@pytest.mark.slow
def test_semi_sync_training_is_refused_at_the_first_batch_on_every_rank(two_ranks: Ranks) -> None:
    for message in two_ranks.run(start_semi_sync, True):
        assert message.startswith("TrainPipelineSemiSync is not supported for Tensor-Train tables")
        assert message.endswith("got tables ['t0', 't1']")
    assert two_ranks.run(start_semi_sync, False) == ["started"] * 2


def first_batch_of_lookup_stage(rank: int, is_training: bool) -> tuple[str, int]:
    """What filling the pipeline raised, and how many batches it had taken by then."""
    _, _, piped, optimizer = plain_and_piped({"t0": TW, "t1": DP})
    piped.train(is_training)
    pipeline = StagedLookupOnCpu(piped, optimizer, CPU)
    iterator = iter(local_batches(rank, 4))
    message = ""
    try:
        pipeline._fill_pipeline(iterator)
    except NotImplementedError as error:
        message = str(error)
    return message, 4 - len(list(iterator))


@pytest.mark.slow
def test_a_stage_of_lookups_is_refused_at_the_first_batch_on_every_rank(two_ranks: Ranks) -> None:
    for message, num_taken in two_ranks.run(first_batch_of_lookup_stage, True):
        assert message.startswith(
            "StagedTrainPipeline with an embedding_lookup_stream is not supported for Tensor-Train"
        )
        assert message.endswith("got tables ['t0', 't1']")
        assert num_taken == 1
    for message, _ in two_ranks.run(first_batch_of_lookup_stage, False):
        assert message == ""
