import warnings

import numpy as np
import pytest
import torch
from torch import nn

from torchrec_tt import TTEmbedding, TTEmbeddingBag
from torchrec_tt.tt.factorize import factorize_rows

IDS = torch.tensor([5, 2, 2, 9, 0, 49, 7])
OFFSETS = torch.tensor([0, 3, 3, 6])  # bag 1 is empty


def make_bag(**kwargs) -> TTEmbeddingBag:
    torch.manual_seed(0)
    return TTEmbeddingBag(
        50, 8, tt_ranks=[4, 4], row_factors=[3, 4, 5], dtype=torch.float64, **kwargs
    )


def dense_twin(bag: TTEmbeddingBag, **kwargs) -> nn.EmbeddingBag:
    with torch.no_grad():
        table = bag.to_dense()
    return nn.EmbeddingBag.from_pretrained(table, freeze=False, **kwargs)


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("padding_idx", [None, 2, -1])
@pytest.mark.parametrize("include_last_offset", [False, True])
def test_it_equals_nn_embedding_bag(mode, padding_idx, include_last_offset):
    options = {
        "mode": mode,
        "padding_idx": padding_idx,
        "include_last_offset": include_last_offset,
    }
    offsets = torch.tensor([0, 3, 3, 6, 7]) if include_last_offset else OFFSETS
    bag = make_bag(**options)
    twin = dense_twin(bag, **options)
    torch.testing.assert_close(bag(IDS, offsets), twin(IDS, offsets))


def test_a_two_dimensional_input_is_bags_of_one_size():
    bag = make_bag(mode="mean")
    ids = IDS[:6].view(2, 3)
    torch.testing.assert_close(bag(ids), dense_twin(bag, mode="mean")(ids))
    weights = torch.rand(2, 3, dtype=torch.float64)
    summed = make_bag(mode="sum")
    torch.testing.assert_close(
        summed(ids, per_sample_weights=weights),
        dense_twin(summed, mode="sum")(ids, per_sample_weights=weights),
    )


# U59
def test_a_two_dimensional_input_may_be_a_view():
    bag = make_bag(mode="sum")
    ids = IDS[:6].view(2, 3).T
    weights = torch.rand(2, 1, dtype=torch.float64).T.expand(3, 2)
    output = bag(ids, per_sample_weights=weights)
    copied = bag(ids.contiguous(), per_sample_weights=weights.contiguous())
    assert torch.equal(output, copied)
    torch.testing.assert_close(
        output,
        dense_twin(bag, mode="sum")(ids.contiguous(), per_sample_weights=weights.contiguous()),
    )


def test_weights_with_padding_equal_nn_embedding_bag():
    bag = make_bag(mode="sum", padding_idx=2)
    weights = torch.rand(7, dtype=torch.float64)
    expected = dense_twin(bag, mode="sum", padding_idx=2)(IDS, OFFSETS, weights)
    torch.testing.assert_close(bag(IDS, OFFSETS, weights), expected)


def test_every_core_gets_the_gradient_of_the_dense_definition():
    bag = make_bag(mode="mean")
    bag(IDS, OFFSETS).square().sum().backward()
    grads = [core.grad.clone() for core in bag.tt_cores]
    bag.zero_grad()
    table = bag.to_dense()
    nn.functional.embedding_bag(IDS, table, OFFSETS, mode="mean").square().sum().backward()
    torch.testing.assert_close(grads, [core.grad for core in bag.tt_cores])


DENSE_OPTIMIZERS = [
    kind
    for kind in vars(torch.optim).values()
    if isinstance(kind, type)
    and issubclass(kind, torch.optim.Optimizer)
    and kind not in (torch.optim.Optimizer, torch.optim.SparseAdam)
]


# U63
@pytest.mark.parametrize("kind", DENSE_OPTIMIZERS)
def test_every_dense_optimizer_of_torch_trains_it(kind):
    bag = make_bag(mode="sum")
    optimizer = kind(bag.parameters(), lr=0.01)

    def evaluate():
        optimizer.zero_grad()
        loss = (bag(IDS, OFFSETS) - 1).square().mean()
        loss.backward()
        return loss

    losses = [optimizer.step(evaluate).item() for _ in range(5)]
    assert losses[-1] < losses[0]


def test_the_state_dict_holds_the_cores():
    bag = make_bag()
    assert list(bag.state_dict()) == ["tt_cores.0", "tt_cores.1", "tt_cores.2"]
    other = make_bag()
    for core in other.tt_cores:
        nn.init.zeros_(core)
    other.load_state_dict(bag.state_dict())
    assert torch.equal(bag(IDS, OFFSETS), other(IDS, OFFSETS))


def test_a_meta_module_has_shapes_and_no_values():
    bag = TTEmbeddingBag(10_000_000, 64, tt_ranks=[16, 16], device="meta")
    assert all(core.is_meta for core in bag.tt_cores)
    assert sum(core.numel() for core in bag.parameters()) == bag.shape.num_parameters


def test_autocast_leaves_cores_and_output_in_float32():
    bag = TTEmbeddingBag(50, 8, tt_ranks=[4, 4], mode="sum")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert bag(IDS, OFFSETS).dtype == torch.float32


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "median"}, "mode must be 'sum' or 'mean', got 'median'"),
        ({"padding_idx": 50}, r"padding_idx must be in \[-50, 50\), got 50"),
        ({"dtype": torch.int32}, "dtype must be one of .*, got torch.int32"),
        ({"output_dtype": torch.int32}, "output_dtype must be None or one of .* got torch.int32"),
        ({"tt_ranks": [4]}, "row_factors|tt_ranks"),
        ({"tt_ranks": 8}, "tt_ranks must be positive integers, got 8"),
        ({"tt_ranks": [4, 4.0]}, r"tt_ranks must be positive integers, got \[4, 4.0\]"),
        ({"row_factors": 5}, "row_factors must be positive integers, got 5"),
        ({"padding_idx": 1.5}, r"padding_idx must be in \[-50, 50\), got 1.5"),
        ({"tt_init": "ones", "device": "meta"}, "tt_init must be one of .* got 'ones'"),
        ({"row_factors": [3, 4, 4]}, "product of at least num_embeddings=50"),
        ({"col_factors": [2, 2, 3]}, "product embedding_dim=8"),
        ({"tt_init": "ones"}, "got 'ones'"),
        ({"check_mode": "none"}, "check_mode must be one of"),
    ],
)
def test_arguments_that_do_not_fit_raise(arguments, message):
    settings = {"tt_ranks": [4, 4], "row_factors": [3, 4, 5], **arguments}
    with pytest.raises(ValueError, match=message):
        TTEmbeddingBag(50, 8, **settings)


def test_what_nn_embedding_bag_has_and_cores_cannot_do_is_refused():
    with pytest.raises(NotImplementedError, match="mode 'max' is not supported"):
        TTEmbeddingBag(50, 8, tt_ranks=[4, 4], mode="max")
    with pytest.raises(NotImplementedError, match="must come with mode 'sum', got mode 'mean'"):
        make_bag(mode="mean")(IDS, OFFSETS, torch.ones(7, dtype=torch.float64))


# U32
@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ((IDS, None), "offsets must be a tensor of 1 dimension .* got None"),
        ((IDS[:6].view(2, 3), OFFSETS), "offsets must be None for a 2-D input"),
        ((IDS.view(1, 1, 7), None), "input must have 1 or 2 dimensions, got 3"),
        ((IDS, [0, 3]), r"offsets must be a tensor of 1 dimension"),
        (([1, 2], OFFSETS), "input must be a tensor, got list"),
        ((IDS, torch.tensor([0, 9])), r"offsets must start at 0, .* got \[0, 9, 7\]"),
        ((IDS, torch.tensor([1, 2])), r"offsets must start at 0, .* got \[1, 2, 7\]"),
        ((IDS, torch.tensor([0, 3, 2])), r"not decrease .* got \[0, 3, 2, 7\]"),
        ((torch.tensor([50]), torch.tensor([0])), r"indices must be in \[0, 50\).*got 50"),
        ((IDS, OFFSETS, torch.ones(3, dtype=torch.float64)), "must have the shape of input"),
    ],
)
def test_inputs_that_do_not_fit_raise(inputs, message):
    with pytest.raises(ValueError, match=message):
        make_bag(mode="sum", padding_idx=2)(*inputs)


def test_numpy_integers_are_integers():
    bag = TTEmbeddingBag(np.int64(50), np.int32(8), tt_ranks=np.array([4, 3]))
    assert bag.shape.tt_ranks == (4, 3)
    assert type(bag.num_embeddings) is int


def test_u25_a_bad_id_warns_where_asked_and_is_ignored_where_asked():
    for mode, warnings_expected in (("warning", 1), ("ignore", 0)):
        bag = make_bag(mode="sum", check_mode=mode)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            output = bag(torch.tensor([50]), torch.tensor([0]))
            bag(torch.tensor([-1]), torch.tensor([0]))
        assert len(caught) == warnings_expected
        assert torch.equal(output, bag(torch.tensor([0]), torch.tensor([0])))


@pytest.mark.slow
@pytest.mark.parametrize("padding_idx", [None, 2])
def test_it_compiles_into_one_graph_and_trains(padding_idx):
    bag = make_bag(mode="sum", padding_idx=padding_idx)
    compiled = torch.compile(bag, fullgraph=padding_idx is None, backend="aot_eager")
    for offsets in (OFFSETS, torch.tensor([0, 2, 4])):
        output = compiled(IDS, offsets)
        expected = bag(IDS, offsets)
        torch.testing.assert_close(output, expected)
        grads = torch.autograd.grad(output.square().sum(), list(bag.parameters()))
        wanted = torch.autograd.grad(expected.square().sum(), list(bag.parameters()))
        torch.testing.assert_close(grads, wanted)


@pytest.mark.slow
def test_it_exports():
    bag = make_bag(mode="sum").requires_grad_(False)
    exported = torch.export.export(bag, (IDS, OFFSETS))
    torch.testing.assert_close(exported.module()(IDS, OFFSETS), bag(IDS, OFFSETS))


# U36
def test_half_cores_give_float32_outputs_unless_another_dtype_is_asked_for():
    bag = TTEmbeddingBag(50, 8, tt_ranks=[4, 4], dtype=torch.bfloat16, output_dtype=torch.float16)
    plain = TTEmbeddingBag(50, 8, tt_ranks=[4, 4], dtype=torch.bfloat16)
    plain.load_state_dict(bag.state_dict())
    ids, offsets = torch.tensor([3, 7, 9]), torch.tensor([0, 2])
    assert plain(ids, offsets).dtype == torch.float32
    assert torch.equal(bag(ids, offsets), plain(ids, offsets).half())
    bag(ids, offsets).sum().backward()
    assert bag.tt_cores[0].grad.dtype == torch.bfloat16


def test_autocast_leaves_the_cores_and_the_output_alone():
    bag = TTEmbeddingBag(50, 8, tt_ranks=[4, 4])
    ids, offsets = torch.tensor([3, 7, 9]), torch.tensor([0, 2])
    expected = bag(ids, offsets)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = bag(ids, offsets)
    assert torch.equal(output, expected)


# U63
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop])
@pytest.mark.parametrize("settings", [{}, {"amsgrad": True}])
def test_optimizers_of_torch_train_the_cores_on_their_dense_gradients(kind, settings):
    if settings and kind is torch.optim.RMSprop:
        settings = {"momentum": 0.9}
    bag = TTEmbeddingBag(50, 8, tt_ranks=[4, 4], dtype=torch.float64)
    optimizer = kind(bag.parameters(), lr=0.05, **settings)
    ids, target = torch.arange(50), torch.randn(50, 8, dtype=torch.float64)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = (bag(ids, ids) - target).square().mean()
        loss.backward()
        assert all(core.grad.layout == torch.strided for core in bag.tt_cores)
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]


# U63
def test_sparse_adam_which_wants_sparse_gradients_says_so_and_changes_nothing():
    bag = TTEmbeddingBag(50, 8, tt_ranks=[4, 4])
    optimizer = torch.optim.SparseAdam(bag.parameters())
    before = [core.detach().clone() for core in bag.tt_cores]
    ids = torch.arange(50)
    bag(ids, ids).sum().backward()
    with pytest.raises(RuntimeError, match="SparseAdam does not support dense gradients"):
        optimizer.step()
    assert all(map(torch.equal, before, bag.tt_cores))


def test_row_strategy_chooses_the_factors_that_are_left_out() -> None:
    bag = TTEmbeddingBag(1_000_000, 64, tt_ranks=[32, 32], row_strategy="fast", device="meta")
    fast = factorize_rows(
        1_000_000,
        row_strategy="fast",
        col_factors=bag.shape.col_factors,
        tt_ranks=bag.shape.tt_ranks,
    )
    assert bag.shape.row_factors == fast != factorize_rows(1_000_000)


@pytest.mark.parametrize("module", [TTEmbeddingBag, TTEmbedding])
def test_precision_reaches_the_lookup_and_changes_nothing_on_the_cpu(module) -> None:
    ids = torch.tensor([[0, 5], [7, 7]])
    torch.manual_seed(0)
    plain = module(24, 12, tt_ranks=[2, 3])
    rows = plain(ids)
    for precision in ("highest", "high", "medium", None):
        hinted = module(24, 12, tt_ranks=[2, 3], precision=precision)
        hinted.load_state_dict(plain.state_dict())
        assert hinted._lookup.precision == precision  # what a call on CUDA passes on
        assert torch.equal(hinted(ids), rows)
    with pytest.raises(ValueError, match=r"precision must be one of .* got 'tf32'"):
        module(24, 12, tt_ranks=[2, 3], precision="tf32")
