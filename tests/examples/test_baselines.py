import pytest
import torch
from baselines import HASHED, HashedEmbeddingBagCollection, hashed_tables, quantize_int4_
from model import table_bytes, table_configs
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

SIZES = (5, *(3,) * 23, 3000, 4000)
TT_COLUMNS = (24, 25)
BATCH_SIZE = 7
CONFIGS = table_configs(SIZES, embedding_dim=16, tt_columns=TT_COLUMNS, tt_ranks=(12, 12))


def looked_up(hashed):
    """Returns ids [26, B], the rows [B, 26, 16] and the weights by table."""
    torch.manual_seed(0)
    collection = HashedEmbeddingBagCollection(hashed).to_empty(device="cpu")
    weights = {}
    for name, bag in collection.stored.embedding_bags.items():
        weights[name] = torch.nn.init.normal_(bag.weight).detach()
    ids = torch.stack([torch.randint(rows, (BATCH_SIZE,)) for rows in SIZES])
    features = KeyedJaggedTensor(
        keys=[config.feature_names[0] for config in CONFIGS],
        values=ids.flatten(),
        lengths=torch.ones(ids.numel(), dtype=torch.int32),
    )
    out = collection(features)
    assert out.keys() == features.keys()
    return ids, out.values().reshape(BATCH_SIZE, 26, 16).detach(), weights


@pytest.mark.parametrize("method", HASHED)
def test_other_columns_keep_their_tables_and_bytes_are_those_of_tt(method):
    hashed = hashed_tables(CONFIGS, method=method)
    ids, rows, weights = looked_up(hashed)
    torch.testing.assert_close(rows[:, 0], weights["t_cat_0"][ids[0]], rtol=0, atol=0)
    budget = sum(table_bytes(config) for config in CONFIGS)
    assert 0.99 * budget < sum(table_bytes(config) for config in hashed.tables) <= budget


def test_hash_reads_the_row_of_the_id_modulo_fewer_rows():
    ids, rows, weights = looked_up(hashed_tables(CONFIGS, method="hash"))
    for column in TT_COLUMNS:
        weight = weights[f"t_cat_{column}"]
        assert len(weight) < SIZES[column]
        torch.testing.assert_close(rows[:, column], weight[ids[column] % len(weight)])


def test_qr_multiplies_rows_and_tells_all_ids_apart():
    hashed = hashed_tables(CONFIGS, method="qr")
    ids, rows, weights = looked_up(hashed)
    for column in TT_COLUMNS:
        quotients, remainders = (
            weights[f"t_cat_{column}_{name}"] for name in ("quotient", "remainder")
        )
        q, r = ids[column] // len(remainders), ids[column] % len(remainders)
        torch.testing.assert_close(rows[:, column], quotients[q] * remainders[r])
        every = torch.arange(SIZES[column])
        pairs = torch.stack([part(every) for part in hashed.parts[column]])
        assert pairs.unique(dim=1).shape[1] == SIZES[column]


def test_robe_chains_chunks_of_one_array():
    hashed = hashed_tables(CONFIGS, method="robe")
    ids, rows, weights = looked_up(hashed)
    for column in TT_COLUMNS:
        chunks = [weights["t_robe"][part(ids[column])] for part in hashed.parts[column]]
        assert [chunk.shape[1] for chunk in chunks] == [8, 8]
        torch.testing.assert_close(rows[:, column], torch.cat(chunks, dim=1), rtol=0, atol=0)
        places = [part(torch.arange(SIZES[column])) for part in hashed.parts[column]]
        assert (places[0] != places[1]).float().mean() > 0.9  # each place has a hash of its own


@pytest.mark.parametrize(
    ("method", "num_bytes", "message"),
    [
        ("hash", 64, "--compression_bytes must give t_cat_24 a row of dim 16, got none"),
        ("qr", 6400, "--compression_bytes must give t_cat_24 110 rows for quotients"),
        ("robe", 16, "robe needs 32 bytes .* got --compression_bytes 16 and 16"),
    ],
)
def test_too_few_bytes_are_refused(method, num_bytes, message):
    with pytest.raises(ValueError, match=message):
        hashed_tables(CONFIGS, method=method, num_bytes=num_bytes)


def test_int4_rows_have_sixteen_values_and_are_near():
    weight = torch.randn(100, 64)
    rounded = weight.clone()
    quantize_int4_(rounded)
    assert max(len(row.unique()) for row in rounded) == 16
    step = (weight.amax(1) - weight.amin(1)) / 15
    assert ((rounded - weight).abs().amax(1) < 0.6 * step).all()  # half, and a float16 scale
