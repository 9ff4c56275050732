"""The requests that vLLM's server has handed over: their parameters, their tokens, and their ids in
the engines.
"""

from collections.abc import Sequence, Sized
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason

from flying_serving.controller.commands import (
    Dispatch,
    DispatchPrefix,
    DropPart,
    Fail,
    PullAhead,
    Recall,
)
from flying_serving.controller.requests import RequestSpec
from flying_serving.controller.settings import Capacity
from flying_serving.layout.groups import Group, KVSource
from flying_serving.log import logger
from flying_serving.server.requests import xargs
from flying_serving.vllm_adapter.keys import (
    AHEAD_KEY,
    DEADLINE_KEY,
    FULL_AT_KEY,
    HISTORY_KEY,
    LANE_KEY,
    MIGRATED_FROM_KEY,
    OFFER_KEY,
)
from flying_serving.vllm_adapter.scheduler.failures import why_failed


@dataclass
class Stream:
    """One request as the client asked for it.

    `output_ids`: its output tokens so far. `engine_id`: its id in the engine that runs it. It
    changes with each move, so that outputs of the old engine are recognised as stale. `past_ids`:
    its ids in engines that it has left. `may_fill_group`: its group may end it for want of room.
    """

    request: EngineCoreRequest
    output_ids: list[int] = field(default_factory=list)
    engine_id: str = ""
    past_ids: set[str] = field(default_factory=set)
    dispatches: int = 0
    may_fill_group: bool = False


class Streams:
    """Open requests by vLLM's id and by the engines'."""

    def __init__(self, capacity: Capacity, max_model_len: int) -> None:
        self._capacity = capacity
        self._max_model_len = max_model_len
        self._streams: dict[str, Stream] = {}
        self._ids: dict[str, str] = {}
        self._past_ids: dict[str, str] = {}
        self._prefixes: dict[str, str] = {}
        self._ahead: set[int] = set()

    def spec_of(self, prompt: int, params: SamplingParams | None, priority: int) -> RequestSpec:
        """Return the facts that the controller needs about a request with `prompt` prompt tokens.

        Raises:
            VLLMValidationError: naming the field, its value and the allowed values.
        """
        if params is None:
            return RequestSpec(prompt, prompt, priority=priority)
        extra = params.extra_args or {}
        xargs.check_names(extra)
        # vLLM gives a request without max_tokens the rest of the model's length: it takes as many
        # as its group holds
        room, most = self._room_after(prompt), self._most_outputs(prompt, params)
        sure = most if params.ignore_eos else min(params.min_tokens, most)
        return RequestSpec(
            prompt,
            prompt + (max(1, sure) if sure < room else 1),
            most,
            xargs.degree(extra, self._capacity.degrees),
            priority,
            xargs.deadline_s(extra),
            expected_tokens=xargs.tokens(extra, xargs.EXPECTED_KEY, 1, self._max_model_len),
            split_at=xargs.tokens(extra, xargs.SPLIT_KEY, 0, prompt + most),
            most_tokens=prompt + most if most < room else None,
        )

    def _room_after(self, prompt: int) -> int:
        """Return the tokens that the model's length leaves to a prompt, where vLLM's scheduler ends
        a request.
        """
        return max(1, self._max_model_len - prompt)

    def open(self, request: EngineCoreRequest) -> None:
        """Open the stream of a request."""
        self._streams[request.request_id] = Stream(request)

    def close(self, request_id: str) -> None:
        """Forget a request and its ids in engines."""
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            self._ids.pop(stream.engine_id, None)
            for engine_id in stream.past_ids:
                self._past_ids.pop(engine_id, None)

    def engine_id(self, request_id: str) -> str:
        """Return the id of a request in the engine that runs it."""
        return self._streams[request_id].engine_id

    def detach(self, request_id: str) -> str:
        """Detach a request from its engine: further outputs from there are stale. Returns its id
        there.
        """
        stream = self._streams[request_id]
        if self._ids.pop(stream.engine_id, None) is not None:
            stream.past_ids.add(stream.engine_id)
            self._past_ids[stream.engine_id] = request_id
        return stream.engine_id

    def take_out(self, command: Recall | DropPart) -> tuple[str, int] | None:
        """Take a request or part out of its engine, which retains its KV. Returns its id there and
        the number of that KV. None, and nothing is done, if no KV is retained.
        """
        if isinstance(command, DropPart):
            if not command.keeps:
                return None
            return self.drop_part(command.request_id, command.offer), command.offer
        return None if command.offer is None else (self.detach(command.request_id), command.offer)

    def dispatch(self, command: Dispatch) -> EngineCoreRequest | None:
        """Give a request an id in the engine of a group's leader. Returns the message for it: with
        its lane, its tokens so far, and the group's limit.

        None if the request is over by now.
        """
        stream = self._streams.get(command.request_id)
        if stream is None:
            return None
        self._ids.pop(stream.engine_id, None)
        kv = command.migrated_from
        if kv is not None and kv.number in self._ahead:  # the group has pulled its KV under this id
            self._ahead.discard(kv.number)
            stream.engine_id = part_id(command.request_id, kv.number)
        else:
            stream.engine_id = (
                f"{command.request_id}+{stream.dispatches}"
                if stream.dispatches
                else command.request_id
            )
            stream.dispatches += 1
        self._ids[stream.engine_id] = command.request_id
        most = self._most_outputs_of(stream.request)
        stream.may_fill_group = most > command.limit_tokens
        extra: dict[str, Any] = {HISTORY_KEY: list(stream.output_ids)} if stream.output_ids else {}
        more_tokens = self._capacity.step_tokens - 1
        if stream.may_fill_group and more_tokens:  # the step that fills the group is not cut
            extra[FULL_AT_KEY] = command.limit_tokens
        if kv is not None:
            extra[MIGRATED_FROM_KEY] = _source(kv)
        if command.offer is not None:
            extra[OFFER_KEY] = (command.offer, command.publishes)
        return _sent(
            stream.request,
            stream.engine_id,
            command.group,
            min(most, command.limit_tokens + more_tokens),
            extra,
        )

    def dispatch_prefix(self, command: DispatchPrefix) -> EngineCoreRequest | None:
        """Begin the prefix of a split request. Returns the first tokens of its prompt as a request
        of their own; None if the request is over by now.
        """
        stream = self._streams.get(command.request_id)
        if stream is None:
            return None
        engine_id = part_id(command.request_id, command.offer)
        self._prefixes[engine_id] = command.request_id
        token_ids = stream.request.prompt_token_ids
        assert token_ids is not None
        extra: dict[str, Any] = {OFFER_KEY: (command.offer, True)} | _deadline(stream.request)
        cut = replace(
            stream.request,
            prompt_token_ids=token_ids[: command.prefix_tokens],
            sampling_params=SamplingParams(temperature=0.0, ignore_eos=True),
        )
        return _sent(cut, engine_id, command.group, 1, extra)

    def pull_ahead(self, command: PullAhead) -> EngineCoreRequest | None:
        """Begin the part of a split request that pulls ahead. Returns the request for its group,
        which only pulls KV for now; None if it is over by now.
        """
        stream = self._streams.get(command.request_id)
        if stream is None:
            return None
        self._ahead.add(command.kv.number)
        engine_id = part_id(command.request_id, command.kv.number)
        extra = {MIGRATED_FROM_KEY: _source(command.kv), AHEAD_KEY: command.up_to_tokens}
        return _sent(
            stream.request, engine_id, command.group, self._most_outputs_of(stream.request), extra
        )

    def drop_part(self, request_id: str, offer: int) -> str:
        """Forget the part of a split request. Returns its id in its engine."""
        engine_id = part_id(request_id, offer)
        self._ahead.discard(offer)
        self._prefixes.pop(engine_id, None)
        return engine_id

    def request_of(self, engine_id: str) -> str | None:
        """Return the request that has, or had, this id in an engine; None if it is over."""
        return (
            self._ids.get(engine_id)
            or self._prefixes.get(engine_id)
            or self._past_ids.get(engine_id)
        )

    def failure_in(self, output: EngineCoreOutput) -> Fail | None:
        """Return the command to end a request with the error that this output of its engine says.
        None if the output is stale, or says no error.
        """
        request_id, why = self._ids.get(output.request_id), why_failed(output)
        return None if request_id is None or why is None else Fail(request_id, why)

    def end_prefix(self, output: EngineCoreOutput) -> str | None:
        """End the prefix whose last output this is. Returns its request; None if this is no end
        of a prefix.
        """
        return (
            self._prefixes.pop(output.request_id, None)
            if output.finish_reason is not None
            else None
        )

    def _most_outputs_of(self, request: EngineCoreRequest) -> int:
        prompt = prompt_length(request.prompt_token_ids, request.prompt_embeds)
        return self._most_outputs(prompt, request.sampling_params)

    def _most_outputs(self, prompt: int, params: SamplingParams | None) -> int:
        room = self._room_after(prompt)
        return room if params is None or params.max_tokens is None else min(params.max_tokens, room)

    def note_tokens(self, output: EngineCoreOutput) -> bool:
        """Note the tokens of an output and give it vLLM's id. Returns False if it is stale, and
        must not be shown.
        """
        request_id = self._ids.get(output.request_id)
        if request_id is None:
            return False
        output.request_id = request_id
        stream = self._streams[request_id]
        stream.output_ids += output.new_token_ids
        why = why_unscored(output, stream.request.sampling_params)
        if why is not None:
            logger.error("request %s: %s", request_id, why)
        return True

    def is_full(self, output: EngineCoreOutput) -> bool:
        """Return whether the group has ended a request that could go on in a wider one."""
        stream = self._streams[output.request_id]
        if output.finish_reason != FinishReason.LENGTH or not stream.may_fill_group:
            return False
        return len(stream.output_ids) < self._most_outputs_of(stream.request)


def prompt_length(token_ids: Sequence[int] | None, embeds: Sized | None) -> int:
    """Return the tokens of a prompt, which may come as embeddings instead, shape (tokens,
    hidden).
    """
    prompt = embeds if token_ids is None else token_ids
    return 0 if prompt is None else len(prompt)


def part_id(request_id: str, offer: int) -> str:
    """Return the id in its engine of the part of a split request."""
    return f"{request_id}~{offer}"


def _deadline(request: EngineCoreRequest) -> dict[str, Any]:
    """Return the deadline of a request as an engine gets it, if the request has one."""
    extra = (request.sampling_params.extra_args if request.sampling_params else None) or {}
    return {name: value for name, value in extra.items() if name == DEADLINE_KEY}


def _source(kv: KVSource) -> tuple[int, int, int]:
    return kv.group[0], len(kv.group), kv.number


def _sent(
    request: EngineCoreRequest, engine_id: str, group: Group, max_tokens: int, extra: dict[str, Any]
) -> EngineCoreRequest:
    """Return a request for a group's leader: with another id, limit, and `extra`: fields for
    engines only.
    """
    if request.sampling_params is None:
        return replace(request, request_id=engine_id)
    # copied: vLLM's output processing shares the object, and n > 1 shares it between requests
    params = request.sampling_params.clone()
    params.max_tokens = max_tokens
    params.min_tokens = min(params.min_tokens, max_tokens)  # an engine could not decode more
    lane = {LANE_KEY: len(group)} if len(group) > 1 else {}
    params.extra_args = {**(params.extra_args or {}), **lane, **extra} or None
    return replace(request, request_id=engine_id, sampling_params=params)


def why_unscored(output: EngineCoreOutput, params: SamplingParams | None) -> str | None:
    """Return in which tokens an output and the logprobs that its request asked for differ.

    None if they do not, or if `params` asks for no logprobs, or for those of the whole vocabulary.
    vLLM's API server joins tokens and logprobs when a request ends. A step that lacks logprobs, or
    has those of another token, then raises a KeyError that names neither.
    """
    tokens = output.new_token_ids
    if not tokens or params is None or params.num_logprobs in (None, -1):
        return None
    logprobs = output.new_logprobs
    if logprobs is None:
        return f"an output with tokens {tokens} has no logprobs"
    of_logprobs = logprobs.logprob_token_ids[:, 0].tolist()
    if of_logprobs != tokens:
        return f"an output with tokens {tokens} has logprobs of tokens {of_logprobs}"
    return None
