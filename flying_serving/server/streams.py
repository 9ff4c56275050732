"""The requests that vLLM's server has handed over: what was asked, what has come, and their ids in the engines."""

import asyncio
from collections.abc import Sequence, Sized
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason

from flying_serving.controller.commands import Dispatch
from flying_serving.controller.requests import RequestSpec
from flying_serving.controller.settings import Capacity
from flying_serving.server.calls import settle
from flying_serving.server.encoding import shown
from flying_serving.vllm_adapter.keys import HISTORY_KEY, LANE_KEY, MIGRATED_FROM_KEY

DEGREE_KEY = "tp_degree"
DEADLINE_KEY = "queue_deadline_s"


@dataclass
class Stream:
    """One request as the client asked for it.

    `tokens`: what it has got so far. `engine_id`: its id in the engine that runs it; another one after each move, so
    that outputs of the old engine are recognised as stale. `capped`: its group may end it for want of room. `admitted`:
    done when a group has it, or with an error; None if nothing waits for that.
    """

    request: EngineCoreRequest
    tokens: list[int] = field(default_factory=list)
    engine_id: str = ""
    dispatches: int = 0
    capped: bool = False
    admitted: asyncio.Future[None] | None = None

    def admit(self, error: Exception | None = None) -> None:
        """End the wait for a group, with an error if it gets none."""
        if self.admitted is not None:
            settle(self.admitted, error)


class Streams:
    """Open requests by vLLM's id and by the engines'."""

    def __init__(self, capacity: Capacity, max_model_len: int) -> None:
        self._capacity = capacity
        self._max_model_len = max_model_len
        self._streams: dict[str, Stream] = {}
        self._ids: dict[str, str] = {}

    def spec(self, prompt: int, params: SamplingParams | None, priority: int) -> RequestSpec:
        """What the controller has to know of a request with a prompt of that many tokens.

        Raises:
            VLLMValidationError: naming the field, its value and what is allowed.
        """
        if params is None:
            return RequestSpec(prompt, prompt, priority=priority)
        extra = params.extra_args or {}
        for key in (LANE_KEY, HISTORY_KEY, MIGRATED_FROM_KEY):
            if key in extra:
                raise VLLMValidationError(f"vllm_xargs.{key} is not for clients", parameter=f"vllm_xargs.{key}")
        # vLLM gives a request without max_tokens all that the model's length leaves: it takes what its group holds
        left = self._left(prompt)
        most = left if params.max_tokens is None else min(params.max_tokens, left)
        tokens = prompt + 1 if most == left else prompt + most
        return RequestSpec(prompt, tokens, most, self._degree(extra), priority, _deadline(extra))

    def _left(self, prompt: int) -> int:
        """Tokens that the model's length leaves to a prompt, where vLLM's scheduler ends a request."""
        return max(1, self._max_model_len - prompt)

    def _degree(self, extra: dict[str, Any]) -> int | None:
        degree = extra.get(DEGREE_KEY)
        if DEGREE_KEY not in extra or (isinstance(degree, int) and not isinstance(degree, bool)):
            return degree
        field = f"vllm_xargs.{DEGREE_KEY}"
        raise VLLMValidationError(f"{field}={shown(degree)}: must be one of {self._capacity.degrees}", parameter=field)

    def open(self, request: EngineCoreRequest) -> None:
        """Take a request."""
        self._streams[request.request_id] = Stream(request)

    def close(self, request_id: str, error: Exception | None = None) -> None:
        """Forget a request; if it still waits for a group, with an error if one is given."""
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            self._ids.pop(stream.engine_id, None)
            stream.admit(error)

    def admission(self, request_id: str) -> asyncio.Future[None]:
        """A future that is done when a group has the request or it is over; it raises if the request is rejected."""
        admitted = self._streams[request_id].admitted = asyncio.get_running_loop().create_future()
        return admitted

    def reject_waiting(self, error: Exception) -> None:
        """End every `admission` that is not over with an error."""
        for stream in self._streams.values():
            stream.admit(error)

    def engine_id(self, request_id: str) -> str:
        """The id of a request in the engine that runs it."""
        return self._streams[request_id].engine_id

    def recall(self, request_id: str) -> str:
        """Treat further outputs of the request's engine as stale. Returns its id there."""
        stream = self._streams[request_id]
        self._ids.pop(stream.engine_id, None)
        return stream.engine_id

    def to_engine(self, dispatch: Dispatch) -> EngineCoreRequest | None:
        """The request as a group's leader gets it: with its lane, its tokens so far, and the group's limit.

        None if it is over by now.
        """
        stream = self._streams.get(dispatch.request_id)
        if stream is None:
            return None
        request = stream.request
        self._ids.pop(stream.engine_id, None)
        old_id = stream.engine_id
        stream.engine_id = f"{request.request_id}+{stream.dispatches}" if stream.dispatches else request.request_id
        stream.dispatches += 1
        self._ids[stream.engine_id] = request.request_id
        params = request.sampling_params
        if params is None:
            stream.admit()
            return request
        # copied: vLLM's output processing shares the object, and n > 1 shares it between requests
        params = params.clone()
        left = self._left(prompt_length(request.prompt_token_ids, request.prompt_embeds))
        most = left if params.max_tokens is None else min(params.max_tokens, left)
        stream.capped = most > dispatch.limit_tokens
        params.max_tokens = min(most, dispatch.limit_tokens)
        params.min_tokens = min(params.min_tokens, params.max_tokens)  # else its engine could not decode it
        extra = dict(params.extra_args or {})
        if len(dispatch.group) > 1:
            extra[LANE_KEY] = len(dispatch.group)
        if stream.tokens:
            extra[HISTORY_KEY] = list(stream.tokens)
        if dispatch.migrated_from is not None:
            extra[MIGRATED_FROM_KEY] = (dispatch.migrated_from[0], len(dispatch.migrated_from), old_id)
        params.extra_args = extra or None
        stream.admit()
        return replace(request, request_id=stream.engine_id, sampling_params=params)

    def take(self, output: EngineCoreOutput) -> bool:
        """Note the tokens of an output and give it vLLM's id. False if it is stale, and must not be shown."""
        request_id = self._ids.get(output.request_id)
        if request_id is None:
            return False
        output.request_id = request_id
        self._streams[request_id].tokens += output.new_token_ids
        return True

    def is_full(self, output: EngineCoreOutput) -> bool:
        """Whether its group has ended a request that could go on in a wider one."""
        return output.finish_reason == FinishReason.LENGTH and self._streams[output.request_id].capped


def prompt_length(token_ids: Sequence[int] | None, embeds: Sized | None) -> int:
    """Tokens of a prompt, which may come as embeddings instead, shape (tokens, hidden)."""
    prompt = embeds if token_ids is None else token_ids
    return 0 if prompt is None else len(prompt)


def _deadline(extra: dict[str, Any]) -> float | None:
    deadline = extra.get(DEADLINE_KEY)
    if deadline is None:
        return None
    if isinstance(deadline, bool) or not isinstance(deadline, int | float) or not 0 < deadline <= 86_400:
        field = f"vllm_xargs.{DEADLINE_KEY}"
        raise VLLMValidationError(f"{field}={shown(deadline)}: must be a number above 0 up to 86400", parameter=field)
    return float(deadline)
