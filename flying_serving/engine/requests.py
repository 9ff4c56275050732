"""A request's way into the lanes of an engine, and out of them."""

from collections.abc import Callable

from vllm.v1.engine import EngineCoreRequest
from vllm.v1.request import Request, RequestStatus

from flying_serving.engine.aging import Aging
from flying_serving.engine.lane import HashBlocks, Lanes
from flying_serving.layout.groups import Group, aligned_group
from flying_serving.vllm_adapter.keys import LANE_KEY, MIGRATED_FROM_KEY

Route = tuple[int, tuple[Group, str] | None]
"""The group size of a request's lane; and, if its KV is elsewhere, the group that has it and the request's id there."""


class LaneRequests:
    """The requests of all lanes of an engine. `add_own` gives one to lane 1's scheduler, as vLLM does."""

    def __init__(
        self, lanes: Lanes, add_own: Callable[[Request, int], None], aging_s: float, clock: Callable[[], float]
    ) -> None:
        self._lanes = lanes
        self._add_own = add_own
        self._aging = Aging(aging_s)
        self._clock = clock
        self._routes: dict[str, Route] = {}

    def note_route(self, request: EngineCoreRequest) -> HashBlocks | None:
        """Note where the client sends a request; returns how its blocks are hashed there. Runs in the input thread."""
        params = request.sampling_params
        extra = (params.extra_args or {}) if params is not None else {}
        size, migrated_from = extra.pop(LANE_KEY, 1), extra.pop(MIGRATED_FROM_KEY, None)
        source = None
        if migrated_from is not None:
            first, old_size, old_id = migrated_from
            source = aligned_group(first, old_size), old_id
        if size != 1 or source is not None:
            self._routes[request.request_id] = size, source
        return self._lanes.by_size[size].hash_blocks

    def route_of(self, request_id: str) -> Route:
        """What `note_route` has noted, once."""
        return self._routes.pop(request_id, (1, None))

    def admit(self, request: Request, size: int, wave: int = 0) -> None:
        """Give a request to the scheduler of a lane."""
        scheduler = self._lanes.schedulers[size]
        self._aging.arrived(scheduler, request.request_id, self._clock())
        if size == 1:
            self._add_own(request, wave)
        else:
            scheduler.add_request(request)
        if request.num_output_tokens:
            request.take_events()  # it began elsewhere: that it is queued is no news to vLLM's metrics

    def abort(self, request_ids: list[str]) -> None:
        """End requests, in whichever lane they are."""
        for scheduler in self._lanes.schedulers.values():
            here = [i for i in request_ids if i in scheduler.requests]
            scheduler.finish_requests(here, RequestStatus.FINISHED_ABORTED)
