"""Plans that TorchRec's proposers may miss: one sharding type for TT tables, one for others."""

from torchrec.distributed.planner.types import Enumerator, Proposer, ShardingOption, Topology

from torchrec_tt.distributed.planner.lookups import tt_shape_of


class TTUniformProposer(Proposer):
    """Proposes every pair of a sharding type for TT tables and one for regular tables.

    A table that lacks the type of its kind has its fastest option. Few types in one plan are few
    collectives, which proposers that look at one table at a time do not see.
    """

    def load(
        self, search_space: list[ShardingOption], enumerator: Enumerator | None = None
    ) -> None:
        """Makes the proposals."""
        tables: dict[str, dict[str, ShardingOption]] = {}
        is_tt: dict[str, bool] = {}
        for option in search_space:
            best = tables.setdefault(option.fqn, {})
            known = best.get(option.sharding_type)
            if known is None or option.total_perf < known.total_perf:
                best[option.sharding_type] = option
            is_tt[option.fqn] = tt_shape_of(option) is not None
        kinds = {
            kind: sorted({t for fqn, best in tables.items() if is_tt[fqn] == kind for t in best})
            for kind in (True, False)
        }
        self._proposals = [
            [
                best.get(tt_type if is_tt[fqn] else regular_type)
                or min(best.values(), key=lambda option: option.total_perf)
                for fqn, best in tables.items()
            ]
            for tt_type in kinds[True] or [""]
            for regular_type in kinds[False] or [""]
        ]
        self._next = 0

    def propose(self) -> list[ShardingOption] | None:
        """Returns the next proposal, None after the last one."""
        return self._proposals[self._next] if self._next < len(self._proposals) else None

    def feedback(
        self,
        partitionable: bool,
        plan: list[ShardingOption] | None = None,
        perf_rating: float | None = None,
        storage_constraint: Topology | None = None,
    ) -> None:
        """Goes on to the next proposal, whatever became of the last one."""
        self._next += 1
