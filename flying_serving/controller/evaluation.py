"""What a policy sees of a server: what its lanes can do, what they have to do, and what comes."""

from flying_serving.controller.loads import Loads
from flying_serving.controller.needs import needs_of
from flying_serving.controller.pool import TaskPool
from flying_serving.controller.requests import RequestState
from flying_serving.controller.settings import Settings
from flying_serving.controller.switches import Switches
from flying_serving.layout.groups import Layout
from flying_serving.policy.snapshot import Snapshot
from flying_serving.predict.demand import Demand
from flying_serving.predict.migrations import MigrationCost
from flying_serving.predict.steps import StepModel
from flying_serving.predict.work import LaneFigures


class Evaluation:
    """What is known of a server at a time.

    `migrates`: what it takes to migrate KV between groups, by the size of the group that encloses both; where it is not
    known, at first nowhere, KV cannot migrate.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        sizes = sorted(settings.capacity.tokens)
        pinned = settings.policy.pinned_size
        self.layout = Layout.uniform(settings.engines, pinned(sizes) if pinned else 1)
        self.pool = TaskPool(settings.most_waiting, settings.aging_s)
        self.loads = Loads()
        self.steps = StepModel()
        self.migrates: dict[int, MigrationCost] = {}
        self.demand = Demand()
        self.switches = Switches()
        self.started: dict[str, RequestState] = {}
        self._layouts = Layout.all(settings.engines, sizes)

    @property
    def running(self) -> int:
        """How many requests run."""
        return len(self.started)

    @property
    def open_requests(self) -> list[str]:
        """Ids of those that wait or run."""
        return [*(state.request_id for state in self.pool), *self.started]

    def lanes(self) -> dict[int, LaneFigures]:
        """What a group of each size can do, as far as it was measured."""
        limits = self.settings.limits
        return {
            size: LaneFigures(
                self.steps.cost(size),
                limits.max_num_seqs,
                tokens,
                limits.max_num_batched_tokens,
                self.migrates.get(size),
            )
            for size, tokens in self.settings.capacity.tokens.items()
            if self.steps.known(size)
        }

    def snapshot(self, lanes: dict[int, LaneFigures], now_s: float) -> Snapshot:
        """What a policy sees now."""
        unfinished = self.loads.unfinished()
        tokens = sum(state.prefill_tokens for state in unfinished)
        work = self.demand.work(len(self.pool), tokens, self.running - len(unfinished), now_s)
        loads = self.loads.as_seen(self.demand.outputs)
        promised = self.switches.promised(self.settings.objective.horizon_s, now_s)
        needs = needs_of(self.pool, self.loads, sorted(self.settings.capacity.tokens), self.settings.engines, now_s)
        return Snapshot(now_s, self.layout, self._layouts, lanes, loads, work, needs, promised)
