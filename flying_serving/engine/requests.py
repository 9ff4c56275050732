"""A request's way into the lanes of an engine, and out of them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.request import Request, RequestStatus

from flying_serving.engine.aging import Aging
from flying_serving.engine.lane import EngineLanes, HashBlocks
from flying_serving.layout.groups import KVSource, aligned_group
from flying_serving.migration.source import RunningOffer
from flying_serving.vllm_adapter.keys import AHEAD_KEY, LANE_KEY, MIGRATED_FROM_KEY, OFFER_KEY


@dataclass(frozen=True)
class Route:
    """The lane to which the API server sends a request, and its KV.

    `size`: of the lane's groups. `source`: the offer of its KV; None: the request begins here.
    `prefetch_tokens`: the request runs elsewhere, and the KV of this number of its tokens is
    pulled. `offer`: the offer of its KV here.
    """

    size: int = 1
    source: KVSource | None = None
    prefetch_tokens: int | None = None
    offer: RunningOffer | None = None


def _notes(params: SamplingParams | None) -> dict[str, Any]:
    """Return the API server's notes with a request."""
    return (params.extra_args or {}) if params is not None else {}


def route_of(request: Request) -> Route:
    """Return the route of a request, and remove the API server's notes of it."""
    notes = _notes(request.sampling_params)
    size, source, offer = notes.pop(LANE_KEY, 1), None, None
    if MIGRATED_FROM_KEY in notes:
        first, old_size, number = notes.pop(MIGRATED_FROM_KEY)
        source = KVSource(aligned_group(first, old_size), number)
    if OFFER_KEY in notes:
        number, early = notes.pop(OFFER_KEY)
        offer = RunningOffer(number, size, early)
    return Route(size, source, notes.pop(AHEAD_KEY, None), offer)


class LaneRequests:
    """The requests of all lanes of an engine. `add_own` gives a request to lane 1's scheduler, as
    vLLM does.
    """

    def __init__(
        self,
        lanes: EngineLanes,
        add_own: Callable[[Request, int], None],
        aging_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._lanes = lanes
        self._add_own = add_own
        self._aging = Aging(aging_s)
        self._clock = clock

    def hash_blocks(self, request: EngineCoreRequest) -> HashBlocks | None:
        """Return the function that hashes a request's blocks in its lane. Runs in the input
        thread.
        """
        return self._lanes.by_size[_notes(request.sampling_params).get(LANE_KEY, 1)].hash_blocks

    def enqueue(self, request: Request, size: int, wave: int = 0) -> None:
        """Put a request into the queue of a lane's scheduler."""
        scheduler = self._lanes.schedulers[size]
        self._aging.arrived(scheduler, request.request_id, self._clock())
        if size == 1:
            self._add_own(request, wave)
        else:
            scheduler.add_request(request)
        if request.num_output_tokens:
            # the request began elsewhere: that it is queued is no news to vLLM's metrics
            request.take_events()

    def abort(self, request_ids: list[str]) -> None:
        """End requests in any lane."""
        for scheduler in self._lanes.schedulers.values():
            here = [i for i in request_ids if i in scheduler.requests]
            scheduler.finish_requests(here, RequestStatus.FINISHED_ABORTED)
