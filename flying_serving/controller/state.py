"""The state of one server, as its controller knows it.

Each part of the controller has it.
"""

from collections.abc import Sequence
from itertools import count

from flying_serving.controller.deadlines import Deadlines
from flying_serving.controller.hindsight import Hindsight
from flying_serving.controller.lengths import ExpectedLengths
from flying_serving.controller.loads import Loads
from flying_serving.controller.pool import TaskPool
from flying_serving.controller.requests import RequestState
from flying_serving.controller.reservation import Reservation
from flying_serving.controller.rooms import Rooms
from flying_serving.controller.settings import Settings
from flying_serving.controller.splits import Splits
from flying_serving.controller.switches import Switch, Switches
from flying_serving.controller.weight_lending import WeightLending
from flying_serving.layout.groups import Group, KVSource, Layout
from flying_serving.predict.demand import Demand
from flying_serving.predict.migrations import MigrationCost, cost_within
from flying_serving.predict.steps import StepModel
from flying_serving.predict.work import LaneFigures, Work


class ClusterState:
    """The requests and the engines of a server, and the abilities of its groups.

    `layout`: the groups of the engines that are there. `layouts`, `formable`: the layouts that
    these engines can form, and the sizes of their groups.
    `absent_engines`: engines that were lost and are not back, which no layout has.
    `to_restore`: the layout before engines were lost, if it is to be made again.
    `started`: requests that have a group, in the order in which they got it.
    `crowded_out`: group sizes of the long requests that wait for another group beside those that
    there are (`GroupChoice.needs_another_group`).
    `rooms`: the room of groups for requests. `weight_lending`: gives widest groups extra room.
    `migrates`: cost of migrating KV by the size of the group that pulls; sizes without cannot pull.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.sizes = sorted(settings.capacity.kv_tokens)

        pinned_size = settings.policy.pinned_size
        self.layout = Layout.uniform(
            settings.engines, pinned_size(self.sizes) if pinned_size else 1
        )
        self.layouts: Sequence[Layout] = Layout.all(settings.engines, self.sizes)
        self.formable: Sequence[int] = self.sizes
        self.absent_engines: set[int] = set()
        self.to_restore: Layout | None = None

        self.loads = Loads()
        self.rooms = Rooms(settings.capacity, settings.engines, self.loads)
        self.weight_lending = WeightLending(self.rooms, self.loads)
        self.reservation = Reservation(settings)
        self.pool = TaskPool(
            settings.aging_s,
            self.rooms.needs_extra,
            lambda request: request.is_wider_than(self.layout),
        )
        self.started: dict[str, RequestState] = {}
        self.crowded_out: set[tuple[int, ...]] = set()
        self.deadlines = Deadlines()
        self.splits = Splits(self.loads)
        self.switches = Switches()
        self._offers = count(1)

        self.demand = Demand()
        self.lengths = ExpectedLengths(settings, self.demand)
        self.steps = StepModel()
        self.hindsight = Hindsight(settings.objective.horizon_s)
        self.migrates: dict[int, MigrationCost] = {}

    # ---- requests

    @property
    def running(self) -> int:
        """Number of requests that have a group."""
        return len(self.started)

    @property
    def open_requests(self) -> list[str]:
        """Ids of the requests that wait, then of the requests that have a group."""
        return [*(request.request_id for request in self.pool), *self.started]

    def group_of(self, request_id: str) -> Group | None:
        """Return the group of a request; None if it waits or is over."""
        return self.started[request_id].group if request_id in self.started else None

    def outside(self, layout: Layout) -> set[str]:
        """Return the requests that run in groups which `layout` lacks."""
        return {
            request_id
            for request_id, request in self.started.items()
            if request.group not in layout.groups
        }

    def new_offer(self, group: Group) -> KVSource:
        """Return an offer of `group` under a number that no offer had before."""
        return KVSource(group, next(self._offers))

    # ---- engines

    @property
    def sizes_ahead(self) -> set[int]:
        """Sizes of groups that there are, or will be without a decision of the policy."""
        restored = () if self.to_restore is None else self.to_restore.groups
        return {len(group) for group in (*self.layout.groups, *restored)}

    def lane_figures(self) -> dict[int, LaneFigures]:
        """Return the abilities of a group of each size; sizes that were not measured are left
        out.
        """
        limits = self.settings.limits
        return {
            size: LaneFigures.of(
                self.steps,
                size,
                limits.max_num_seqs,
                self.rooms.of_size(size),
                limits.max_num_batched_tokens,
                cost_within(self.migrates, size),
            )
            for size in self.sizes
            if self.steps.known(size)
        }

    # ---- work

    def work(self, now_s: float) -> Work:
        """Return the work at hand, and the expected arrivals."""
        unfinished = self.loads.unfinished.values()
        # the part of a split request is unfinished too
        streaming = self.running + len(self.splits) - len(unfinished)
        prefill_tokens = sum(request.prefill_tokens for request in unfinished)
        return self.demand.work(len(self.pool), prefill_tokens, streaming, now_s)

    def look_back(self, now_s: float) -> None:
        """Compare the forecast of the last span with what followed, if its horizon has passed."""
        if self.hindsight.count(len(self.pool) + self.running, now_s):
            self.begin_span(self.layout, now_s)

    def begin_span(self, layout: Layout, now_s: float, switch: Switch | None = None) -> None:
        """Compare the forecast of the last span with what followed, and begin another one.

        Nothing is compared where load changes no layout, with a service-level objective, whose
        unit is no second, without engines, or before all sizes are measured.
        """
        policy, objective = self.settings.policy, self.settings.objective
        if not policy.by_load or objective.has_slo or not layout.groups:
            return
        lanes = self.lane_figures()
        if len(lanes) == len(self.sizes):
            self.hindsight.begin(layout, lanes, self.work(now_s), now_s, switch)

    def check_integrity(self) -> None:
        """Raise AssertionError unless each request waits or runs, and is booked only there."""
        waiting = {request.request_id for request in self.pool}
        assert waiting.isdisjoint(self.started), f"wait and run: {waiting & self.started.keys()}"

        expected = {(request_id, request.group) for request_id, request in self.started.items()}
        expected |= {
            (split.part.request_id, split.part_group) for split in self.splits.open.values()
        }
        booked = {
            (request_id, group)
            for group in self.loads.groups
            for request_id in self.loads[group].requests
        }
        assert booked == expected, f"booked {booked}, but running {expected}"
        assert self.splits.open.keys() <= self.started.keys(), f"split: {list(self.splits.open)}"

        self.loads.check_integrity()
        absent, layout = self.absent_engines, self.layout
        assert absent.isdisjoint(layout.engines), f"{absent} are lost, in {layout}"
