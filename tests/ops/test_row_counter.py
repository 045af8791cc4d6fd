import pytest
import torch
from torch import Tensor

from torchrec_tt.ops.embedding_bag import plan
from torchrec_tt.ops.lookup import Lookup, TTTable
from torchrec_tt.ops.row_counter import count_rows, place_rows
from torchrec_tt.tt.shape import TTShape

MASK = 2**64 - 1


def hash_row(row: int) -> int:
    """MurmurHash3's finaliser, as csrc/row_tags.h has it."""
    h = row & MASK
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        h = (h ^ h >> 33) * factor & MASK
    return h ^ h >> 33


def sets_of(row: int, num_sets: int) -> tuple[int, int]:
    h = hash_row(row)
    return (h >> 32) * num_sets >> 32, (h & 0xFFFFFFFF) * num_sets >> 32


def slots_of(row: int, num_sets: int) -> list[int]:
    return [8 * s + way for s in sets_of(row, num_sets) for way in range(8)]


class Counter:
    """The counter of one table, and what must be in it."""

    def __init__(self, num_cells: int) -> None:
        self.ids = torch.full((num_cells,), -1)
        self.heats = torch.zeros(num_cells)
        self.buckets: list[list[list]] = [[[-1, 0.0] for _ in range(8)] for _ in self.ids[::8]]

    def expect(self, row: int, lookups: int, *, clock: int) -> None:
        bucket = self.buckets[sets_of(-1 - row, len(self.buckets))[0]]
        cell = next((cell for cell in bucket if cell[0] == row), None)
        if cell is not None:
            cell[1] = clock or cell[1] + lookups
        elif clock:
            oldest = min(bucket, key=lambda cell: (cell[0] >= 0, cell[1]))
            oldest[:] = [row, clock]
        else:
            coldest = min(bucket, key=lambda cell: cell[1])
            coldest[1] -= lookups
            if coldest[1] <= 0:
                coldest[:] = [row, lookups]

    def check(self) -> None:
        wanted = torch.tensor([cell for bucket in self.buckets for cell in bucket]).double()
        torch.testing.assert_close(self.ids, wanted[:, 0].long())
        torch.testing.assert_close(self.heats, wanted[:, 1].float())


def make_lookup(*row_factors: tuple[int, ...]) -> Lookup:
    tables = []
    for t, m in enumerate(row_factors):
        d = len(m)
        rows = int(torch.tensor(m).prod())
        shape = TTShape(
            num_embeddings=rows,
            embedding_dim=2**d,
            row_factors=m,
            col_factors=(2,) * d,
            tt_ranks=(2,) * (d - 1),
        )
        offset = 100 * t
        tables.append(
            TTTable(name=f"t{t}", shape=shape, row_offset=offset, num_rows=rows - 2 * offset)
        )
    return Lookup(tables)


def with_hits(batch_plan: list[Tensor], lookup: Lookup, places: list[int]) -> list[Tensor]:
    """Adds rows that were looked up once at places in the slots of all tables one after another."""
    order, inverse, row_keys, row_starts, prefix_starts, counts = batch_plan
    end = sum(table.shape.num_rows_padded for table in lookup.tables)
    keys = end + torch.tensor(places)
    unique, n = int(counts[0]), len(order)
    row_keys = torch.cat([row_keys[:unique], keys])
    row_starts = torch.cat([row_starts[: unique + 1], n + 1 + torch.arange(len(keys)).int()])
    counts = torch.tensor([unique + len(keys), unique, int(counts[2]), 0])
    return [order, inverse, row_keys, row_starts, prefix_starts, counts]


@pytest.mark.parametrize("clock", [0, 7])
def test_counts_of_tables_are_those_of_the_model(clock):
    lookup = make_lookup((30, 40), (7, 9, 11), (5, 6, 7, 8))
    counters = [Counter(24), Counter(8), Counter(24)]
    heats = [torch.zeros(16), torch.zeros(0), torch.zeros(16)]  # the second has no cache
    statistics = [torch.zeros(3, dtype=torch.int64) for _ in counters]
    generator = torch.Generator().manual_seed(0)
    for step in range(20):
        sizes = [table.block_size for table in lookup.tables]
        ids = [torch.randint(size, (60,), generator=generator) for size in sizes]
        ids = [torch.where(x % 3 > 0, x % 20, x) for x in ids]
        batch_plan = plan(torch.cat(ids), torch.arange(0, 181, 20), lookup=lookup)
        now = clock + step if clock else 0
        count_rows(
            with_hits(batch_plan, lookup, [0, 15, 16 + 3]),
            heats,
            [counter.ids for counter in counters],
            [counter.heats for counter in counters],
            statistics,
            lookup=lookup,
            clocks=[now] * 3,
        )
        for t in (0, 2):
            for row, lookups in in_plan_order(ids[t], lookup.tables[t]):
                counters[t].expect(row, lookups, clock=now)
            counters[t].check()
            assert statistics[t].tolist()[1] == 60 * (step + 1)
    assert [int(each[0]) for each in statistics] == [40, 0, 20]
    assert statistics[1].tolist() == [0, 0, 0]
    assert heats[0].tolist() == [
        clock + 19 if clock else 20,
        *[0] * 14,
        clock + 19 if clock else 20,
    ]
    assert heats[2][3] == (clock + 19 if clock else 20)


def in_plan_order(ids: Tensor, table: TTTable) -> list[tuple[int, int]]:
    """Each row of the table and its lookups, by mid digit, head digits and last digit."""
    rows, lookups = (ids + table.row_offset).unique(return_counts=True)
    *m, m_last = table.shape.row_factors
    m_mid = m[-1] if len(m) > 1 else 1
    prefix = rows // m_last
    key = (prefix % m_mid * table.shape.num_rows_padded + prefix // m_mid) * m_last + rows % m_last
    order = key.argsort()
    return list(zip(rows[order].tolist(), lookups[order].tolist(), strict=True))


def test_two_cells_per_slot_find_the_rows_most_looked_up():
    rows, slots, steps = 100_000, 1000, 40
    lookup = make_lookup((50, 40, 50))
    weights = torch.arange(1, rows + 1, dtype=torch.float64) ** -1.05
    hot = torch.randperm(rows, generator=torch.Generator().manual_seed(1))
    counter, statistics = Counter(2 * slots), torch.zeros(3, dtype=torch.int64)
    generator = torch.Generator().manual_seed(2)
    for _ in range(steps):
        ids = hot[torch.multinomial(weights, 4096, replacement=True, generator=generator)]
        batch_plan = plan(ids, torch.arange(4097), lookup=lookup)
        count_rows(
            batch_plan,
            [torch.zeros(slots)],
            [counter.ids],
            [counter.heats],
            [statistics],
            lookup=lookup,
            clocks=[0],
        )
    ids = torch.full((slots,), -1)
    place_rows(ids, torch.zeros(slots), counter.ids, counter.heats, ratio=1, margin=0)
    probability = torch.zeros(rows, dtype=torch.float64).index_put((hot,), weights / weights.sum())
    reached, best = probability[ids[ids >= 0]].sum(), probability[hot[:slots]].sum()
    assert reached > 0.95 * best
    assert statistics[1] == 4096 * steps


def placed(ids: Tensor, heats: Tensor, candidates: dict[int, float], **kwargs):
    num_cells = -(-len(candidates) // 8) * 8
    counter_ids, counter_heats = torch.full((num_cells,), -1), torch.zeros(num_cells)
    counter_ids[: len(candidates)] = torch.tensor(list(candidates))
    counter_heats[: len(candidates)] = torch.tensor(list(candidates.values()))
    result = place_rows(ids, heats, counter_ids, counter_heats, **kwargs)
    return result, counter_ids, counter_heats


def test_rows_lie_in_their_sets_and_fill_the_cache():
    num_sets = 32
    ids, heats = torch.full((8 * num_sets,), -1), torch.zeros(8 * num_sets)
    candidates = {row: 1000.0 - row for row in range(2 * len(ids))}
    (slots, evicted, evicted_heats), counter_ids, _ = placed(
        ids, heats, candidates, ratio=1, margin=0
    )
    assert len(slots.unique()) == len(slots) == (ids >= 0).sum() == len(ids)
    assert (evicted == -1).all()
    assert (evicted_heats == 0).all()
    for slot, row in enumerate(ids.tolist()):
        assert slot in slots_of(row, num_sets)
        assert heats[slot] == candidates[row]
    assert not set(ids.tolist()) & set(counter_ids.tolist())  # what was placed left the counter
    assert (ids[ids >= 0] < len(ids)).float().mean() > 0.95  # nearly all are the hottest


def test_only_rows_that_are_hotter_by_ratio_and_margin_take_a_slot():
    ids, heats = torch.arange(100, 108), torch.full((8,), 10.0)
    heats[5] = 4.0
    colder = {1: 10.0, 2: 6.0}
    (slots, *_), counter_ids, _ = placed(ids, heats, colder, ratio=1.25, margin=1)
    assert slots.tolist() == [5]  # 10 > 1.25 * 4 + 1; then 6 is less than what the others have
    assert ids.tolist() == [100, 101, 102, 103, 104, 1, 106, 107]
    assert counter_ids.tolist()[:2] == [-1, 2]
    (slots, evicted, evicted_heats), _, counter_heats = placed(
        ids, heats, {3: 13.5, 4: 14.0, 5: 13.5}, ratio=1.25, margin=1
    )
    assert (slots.tolist(), evicted.tolist(), evicted_heats.tolist()) == ([0], [100], [10.0])
    assert ids[0] == 4
    assert counter_heats.tolist()[:3] == [13.5, 0.0, 13.5]


def test_a_row_never_takes_a_second_slot():
    ids, heats = torch.arange(8), torch.ones(8)
    (slots, *_), counter_ids, _ = placed(ids, heats, {3: 100.0}, ratio=1, margin=0)
    assert slots.numel() == 0
    assert ids.tolist() == list(range(8))
    assert (counter_ids == -1).all()


def test_no_cache_takes_no_row():
    (slots, *_), counter_ids, _ = placed(
        torch.zeros(0, dtype=torch.int64), torch.zeros(0), {3: 1.0}, ratio=1, margin=0
    )
    assert slots.numel() == 0
    assert counter_ids[0] == 3


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        ("heats", torch.zeros(16), "heats and counter_heats must have the sizes"),
        ("ids", torch.zeros(7, dtype=torch.int64), "ids must be .* of a multiple of 8 elements"),
        ("counter_ids", torch.zeros(8), "counter_ids must be contiguous, on the CPU, Long"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(argument, value, message):
    tensors = {
        "ids": torch.full((8,), -1),
        "heats": torch.zeros(8),
        "counter_ids": torch.full((8,), -1),
        "counter_heats": torch.zeros(8),
    }
    with pytest.raises(ValueError, match=message):
        place_rows(**(tensors | {argument: value}), ratio=1, margin=0)


def test_one_entry_per_table_is_asked_for():
    lookup = make_lookup((30, 40), (30, 40))
    batch_plan = plan(torch.tensor([1, 2]), torch.arange(3), lookup=lookup)
    with pytest.raises(ValueError, match="must have 2 entries, one per table, got 1"):
        count_rows(batch_plan, [torch.zeros(8)], [], [], [], lookup=lookup, clocks=[])


def test_opcheck():
    lookup = make_lookup((3, 4))
    batch_plan = plan(torch.tensor([1, 2, 1]), torch.arange(4), lookup=lookup)
    counter = (torch.full((8,), -1), torch.zeros(8))
    statistics = torch.zeros(3, dtype=torch.int64)
    operators = torch.ops.torchrec_tt
    torch.library.opcheck(
        operators.count_rows.default,
        (
            batch_plan,
            lookup.encoded_tables,
            [torch.zeros(8)],
            [counter[0]],
            [counter[1]],
            [statistics],
            [0],
        ),
    )
    torch.library.opcheck(
        operators.place_rows.default,
        (torch.full((8,), -1), torch.zeros(8), torch.arange(8), torch.arange(8.0), 1.0, 0.0),
        test_utils=("test_schema", "test_faketensor"),  # its sizes depend on the values
    )
