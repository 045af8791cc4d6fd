import pytest
import torch

from tests.ops.reference import make_cores, make_lookup
from torchrec_tt.ops.embedding_bag import embedding_bag, plan
from torchrec_tt.ops.lookup import Lookup, TTTable
from torchrec_tt.tt.cores import rows
from torchrec_tt.tt.shape import TTShape


def test_u30_int32_ids_cannot_address_a_table_beyond_int32():
    shape = TTShape(
        num_embeddings=2**31 + 10,
        embedding_dim=2,
        row_factors=(50_000, 50_000),
        col_factors=(1, 2),
        tt_ranks=(1,),
    )
    lookup = Lookup([TTTable(name="t", shape=shape)])
    with pytest.raises(ValueError, match="indices must be int64 for a table of 2147483658 rows"):
        plan(torch.zeros(1, dtype=torch.int32), torch.tensor([0, 1]), lookup=lookup)


@pytest.mark.parametrize("bad_id", [57 + 1, 60, 2**40, -1, -2])
def test_u25_u26_u29_ids_outside_the_table_raise(bad_id):
    # 58 rows of 60 that the cores hold: 58 and 59 are out of range although the cores have them
    lookup = make_lookup("3 cores")
    with pytest.raises(ValueError, match=rf"indices must be in \[0, 58\) .* got {bad_id} at .* 1"):
        plan(torch.tensor([0, bad_id]), torch.tensor([0, 2]), lookup=lookup)


# U29
@pytest.mark.filterwarnings("ignore:indices must be in")
@pytest.mark.parametrize("mode", ["warning", "ignore"])
@pytest.mark.parametrize("bad_id", [58, -1, -2])
def test_u25_u26_ids_outside_the_table_read_row_0_where_asked(mode, bad_id):
    lookup = make_lookup("3 cores", check_mode=mode)
    cores = make_cores(lookup)
    ids, offsets = torch.tensor([4, bad_id]), torch.tensor([0, 1, 2])
    output = embedding_bag(ids, offsets, cores=cores, lookup=lookup)
    row_0 = embedding_bag(torch.tensor([4, 0]), offsets, cores=cores, lookup=lookup)
    assert torch.equal(output, row_0)
    assert ids.tolist() == [4, bad_id]
    output.sum().backward()
    assert int(plan(ids, offsets, lookup=lookup)[-1][3]) == 1


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([0, 3, 2], "offsets must not decrease, got 3 then 2 at position 2"),
        ([0, 3, 4], "offsets must end at the number of indices, 3, got 4"),
        ([0, 1, 2], "offsets must end at the number of indices, 3, got 2"),
        ([1, 2, 3], "offsets must start at 0, got 1"),
        ([], r"offsets must have features \* batch \+ 1 entries, got 0"),
    ],
)
def test_u32_offsets_that_do_not_fit_raise(offsets, message):
    lookup = make_lookup("3 cores")
    with pytest.raises(ValueError, match=message):
        plan(torch.tensor([0, 1, 2]), torch.tensor(offsets, dtype=torch.int64), lookup=lookup)


def test_offsets_of_the_wrong_length_for_the_features_raise():
    lookup = make_lookup("3 cores", num_features=2)
    with pytest.raises(ValueError, match="got 4 for 2 features"):
        plan(torch.tensor([0]), torch.tensor([0, 0, 0, 1]), lookup=lookup)


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        (torch.tensor([1.0]), "int32 or int64"),
        (torch.tensor([[1]]), "must have 1 dimension, got 2"),
    ],
)
def test_indices_of_another_kind_raise(indices, message):
    with pytest.raises(ValueError, match=message):
        plan(indices, torch.tensor([0, 1]), lookup=make_lookup("3 cores"))


def test_a_row_wise_block_reads_its_own_rows_and_no_others():
    shape = make_lookup("3 cores").tables[0].shape
    block = Lookup([TTTable(name="t", shape=shape, row_offset=40, num_rows=10)])
    cores = make_cores(block)
    output = embedding_bag(torch.arange(10), torch.arange(11), cores=cores, lookup=block)
    torch.testing.assert_close(output, rows(cores, torch.arange(40, 50), shape=shape))
    with pytest.raises(ValueError, match=r"indices must be in \[0, 10\)"):
        plan(torch.tensor([10]), torch.tensor([0, 1]), lookup=block)


def test_an_empty_block_takes_no_ids_in_any_mode():
    shape = make_lookup("3 cores").tables[0].shape
    table = TTTable(name="t", shape=shape, row_offset=58, num_rows=0)
    lookup = Lookup([table], check_mode="ignore")
    output = embedding_bag(
        torch.empty(0, dtype=torch.int64),
        torch.zeros(3, dtype=torch.int64),
        cores=make_cores(lookup),
        lookup=lookup,
    )
    assert torch.equal(output, torch.zeros(2, 16))
    with pytest.raises(ValueError, match=r"indices must be in \[0, 0\)"):
        plan(torch.tensor([0]), torch.tensor([0, 1]), lookup=lookup)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pooling": "max"}, "pooling must be one of .* got 'max'"),
        ({"check_mode": "none"}, "check_mode must be one of .* got 'none'"),
    ],
)
def test_unknown_choices_raise(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_lookup("3 cores", **arguments)
