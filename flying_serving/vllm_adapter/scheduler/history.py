"""Requests that go on in another group. A request brings its output tokens, and they are computed
again, as vLLM does after a preemption.

To the scheduler, penalties, logits processors, grammars and the request's own random numbers these
tokens are outputs; they are not given out a second time.
"""

import pkgutil
from collections.abc import Callable
from concurrent.futures import Future
from functools import cache
from importlib.metadata import entry_points
from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.torch_utils import guard_cuda_initialization
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.request import Request
from vllm.v1.sample.logits_processor import LOGITSPROCS_GROUP

from flying_serving.vllm_adapter.keys import GENERATOR_KEY, HISTORY_KEY
from flying_serving.vllm_adapter.model_runner.rank_widths import degrees_differ
from flying_serving.vllm_adapter.speculation.draws import skip_draws


def history_of(params: SamplingParams | None) -> list[int]:
    """Return the tokens that a request got elsewhere."""
    extra = params.extra_args if params is not None else None
    return list((extra or {}).get(HISTORY_KEY) or ())


FOLLOWS_OUTPUTS = "follows_outputs"
"""A class of logits processors has this attribute, and it is true, if its state follows from a
request's outputs.

A processor that begins with a history then reaches the state that it would reach token by token.
vLLM asks the same of it after a preemption.
"""


def stateful_processors(model_config: Any) -> list[str]:
    """Return the names of the users' logits processors that do not declare that they follow a
    request's outputs.
    """
    classes = users_processors(model_config)
    return [found.__qualname__ for found in classes if not getattr(found, FOLLOWS_OUTPUTS, False)]


def users_processors(model_config: Any) -> tuple[type, ...]:
    """Return the classes of users' logits processors: installed ones, then those of the flag."""
    return _loaded(tuple(model_config.logits_processors or ()))


@cache
def _loaded(named: tuple[type | str, ...]) -> tuple[type, ...]:
    """Load the classes of logits processors.

    vLLM has a loader for each of its model runners, which refuses classes for the other one. It
    makes this check itself where it loads them.
    """
    with guard_cuda_initialization():
        installed = [entry.load() for entry in entry_points(group=LOGITSPROCS_GROUP)]
        given = [name if isinstance(name, type) else pkgutil.resolve_name(name) for name in named]
    return (*installed, *given)


def why_not_migratable(request: EngineCoreRequest, model_config: Any) -> str | None:
    """Return why a request cannot go on elsewhere once it has begun; None if it can."""
    params = request.sampling_params
    if params is None:
        return "it has no sampling parameters"
    reasons = (
        (params.prompt_logprobs is not None, "logprobs of its prompt would be given out again"),
        (
            params.prompt_logprob_token_ids is not None,
            "logprobs of its prompt would be given out again",
        ),
        (request.prompt_embeds is not None, "its prompt has embeddings"),
        (request.resumable, "its prompt is still coming"),
        (
            params.thinking_token_budget is not None,
            "what is left of its thinking budget is not in its tokens",
        ),
        (
            bool(stateful_processors(model_config)),
            "a logits processor may hold a state that is not in its tokens",
        ),
        (degrees_differ(model_config), "groups of another size compute other outputs"),
        (
            params.seed is not None and model_config.use_fp64_gumbel,
            "its random numbers are of double precision",
        ),
    )
    return next((reason for found, reason in reasons if found), None)


# Notes of a request with outputs, for the runners, what they cannot tell from its tokens. Called
# with the request, and with a function as `Drafter.note_generator` where it has a grammar.
Note = Callable[..., None]


def nothing_to_note(_request: Request, _allowed: Any = None) -> None:
    """Note nothing: the tokens say it all."""


def resume(
    request: Request, source: EngineCoreRequest, grammars: Any, note: Note = nothing_to_note
) -> None:
    """Give a new request, made from `source`, its history, before a scheduler has it. Its grammar
    may still be compiling.

    `grammars`: the engine's StructuredOutputManager. `note`: what its kind of requests needs.
    """
    history = history_of(source.sampling_params)
    if not history:
        return
    request.append_output_token_ids(history)
    request.prefill_stats = None  # of its first prefill, wherever that was
    structured = request.structured_output_request
    if structured is None:
        note(request)
    else:
        replay = Request.from_engine_core_request(source, None)
        structured.grammar = grammars.executor.submit(
            _replay, grammars, (request, replay), structured._grammar, note
        )


def _replay(
    grammars: Any,
    requests: tuple[Request, Request],
    compiled: Future[Any],
    note: Note,
) -> Any:
    """Advance a grammar by a request's outputs, token by token, in a copy of the request without
    them. Raises if it rejects one.
    """
    request, replay = requests
    state: Any = replay.structured_output_request
    state.grammar = compiled.result()

    def advance(up_to: int) -> None:
        for token in request.all_token_ids[replay.num_tokens : up_to]:
            replay.append_output_token_ids(token)
            if not grammars.accept_tokens(replay, [token]):
                raise ValueError(
                    f"{HISTORY_KEY}: the grammar of request {request.request_id} does not allow it"
                )

    def allowed(up_to: int, drafts: list[int]) -> list[int]:
        advance(up_to)
        valid: list[int] = grammars.validate_tokens(replay, drafts)
        return valid

    note(request, allowed)
    advance(request.num_tokens)
    request.structured_output_request.reasoning_ended = state.reasoning_ended
    request.structured_output_request.reasoner = state.reasoner
    return state.grammar


def add_with_history(original: Any, self: Any, request: Any) -> Any:
    """Wrap `InputBatch.add_request`: a request that is new here begins with its history as its
    outputs.
    """
    history = history_of(request.sampling_params)
    if history and not request.output_token_ids:
        request.output_token_ids = history
        if request.generator is not None:
            state = request.sampling_params.extra_args.get(GENERATOR_KEY)
            if state is None:
                skip_draws(request.generator, len(history), self.vocab_size)
            else:
                request.generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    return original(self, request)
