"""A request's way into the engine: to the scheduler of its lane, at once or when its KV has come, and out again."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from vllm.v1.engine import EngineCoreRequest
from vllm.v1.request import Request, RequestStatus

from flying_serving.engine.aging import Aging
from flying_serving.engine.group import Leader
from flying_serving.engine.moves import Moves
from flying_serving.layout.groups import aligned_group
from flying_serving.vllm_adapter.history import resume
from flying_serving.vllm_adapter.keys import LANE_KEY, MOVED_FROM_KEY


class LaneRequests:
    """The part of an engine that takes requests, before vLLM's in the order of base classes."""

    scheduler: Any
    leaders: dict[int, Leader]
    moves: Moves
    aging: Aging
    structured_output_manager: Any
    request_block_hasher: Any
    _hashers: dict[int, Any]
    _lane_of: dict[str, int]
    _moved_from: dict[str, tuple[int, int, str]]

    def preprocess_add_request(self, request: EngineCoreRequest) -> tuple[Request, int]:
        """vLLM's, with the block hashes of the request's lane, and its history. Runs in the input thread."""
        params = request.sampling_params
        extra = (params.extra_args or {}) if params is not None else {}
        size = extra.pop(LANE_KEY, 1)
        if size != 1:
            self._lane_of[request.request_id] = size
        if MOVED_FROM_KEY in extra:
            self._moved_from[request.request_id] = extra.pop(MOVED_FROM_KEY)
        self.request_block_hasher = self._hashers[size]
        made, wave = super().preprocess_add_request(request)  # type: ignore[misc]
        resume(made, request, self.structured_output_manager)
        return made, wave

    def add_request(self, request: Request, request_wave: int = 0) -> None:
        """To the scheduler of the lane that the client chose, at once or when its KV is there."""
        size = self._lane_of.pop(request.request_id, 1)
        moved_from = self._moved_from.pop(request.request_id, None)
        if moved_from is None:
            self._admit(request, size, request_wave)
            return
        first, old_size, old_id = moved_from
        self.moves.expect(request, size, aligned_group(first, old_size), old_id, time.monotonic())

    def _admit(self, request: Request, size: int, wave: int = 0) -> None:
        scheduler = self.scheduler if size == 1 else self.leaders[size].scheduler
        self.aging.came(scheduler, request.request_id, time.monotonic())
        if size == 1:
            super().add_request(request, wave)  # type: ignore[misc]
        else:
            scheduler.add_request(request)
        if request.num_output_tokens:
            request.take_events()  # it began elsewhere: that it is queued is no news to vLLM's metrics

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """In whichever lane they are."""
        ids = list(request_ids)
        for scheduler in self._schedulers():
            scheduler.finish_requests([i for i in ids if i in scheduler.requests], RequestStatus.FINISHED_ABORTED)
        self.moves.abort(ids)

    def _schedulers(self) -> list[Any]:
        return [self.scheduler, *(leader.scheduler for leader in self.leaders.values())]
