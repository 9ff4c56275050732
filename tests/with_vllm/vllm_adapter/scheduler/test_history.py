"""Histories: what the scheduler, the batch and the grammar do with a request that has one."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.request import Request

from flying_serving.vllm_adapter.keys import GENERATOR_KEY, HISTORY_KEY
from flying_serving.vllm_adapter.scheduler.history import (
    add_with_history,
    history_of,
    resume,
    skip_draws,
    why_not_migratable,
)
from tests.with_vllm.vllm_adapter.histories import VOCAB, model, source

# ---- the request


def test_a_history_is_read_from_the_parameters() -> None:
    """And is empty for whoever has none."""
    assert history_of(None) == []
    assert history_of(SamplingParams()) == []
    assert history_of(SamplingParams(extra_args={"other": 1})) == []
    assert history_of(SamplingParams(extra_args={HISTORY_KEY: (7, 8)})) == [7, 8]


def test_a_resumed_request_has_its_history_as_outputs() -> None:
    """Its block hashes cover them, and the statistics of a prefill are not told again."""
    sent = source([7, 8, 9])
    hashed: list[int] = []

    def hasher(request: Request) -> list[Any]:
        hashed.append(request.num_tokens)
        return []

    request = Request.from_engine_core_request(sent, hasher)
    resume(request, sent, None)
    assert list(request.output_token_ids) == [7, 8, 9]
    assert list(request.all_token_ids) == [1, 2, 3, 4, 5, 7, 8, 9]
    assert request.num_prompt_tokens == 5
    assert request.num_output_tokens == 3
    assert request.num_tokens == 8
    assert hashed == [5, 8]
    assert request.prefill_stats is None


@pytest.mark.parametrize("sent", [source(), source([])], ids=["none", "empty"])
def test_a_request_without_history_stays_as_it_is(sent: EngineCoreRequest) -> None:
    """Whether it migrated before its first token or not at all."""
    request = Request.from_engine_core_request(sent, None)
    resume(request, sent, None)
    assert request.num_output_tokens == 0
    assert request.prefill_stats is not None


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (source(seed=3, temperature=1.0, logprobs=5, min_tokens=3, presence_penalty=1.0), None),
        (source(regex="a*"), None),
        (source(prompt_logprobs=0), "prompt"),
        (source(prompt_logprob_token_ids=[[1]]), "prompt"),
        (source(thinking_token_budget=5), "thinking budget"),
    ],
)
def test_requests_that_cannot_migrate_say_why(sent: EngineCoreRequest, reason: str | None) -> None:
    why = why_not_migratable(sent, model())
    assert (why is None) if reason is None else (why is not None and reason in why)


def test_models_and_seeds_that_cannot_migrate() -> None:
    """Pooling, embeddings, streamed prompts, random numbers of another kind."""
    usual, doubles = model(), model(use_fp64_gumbel=True)
    for field, value in (
        ("sampling_params", None),
        ("prompt_embeds", torch.zeros(5, 2)),
        ("resumable", True),
    ):
        sent = source()
        setattr(sent, field, value)
        assert why_not_migratable(sent, usual) is not None
    assert why_not_migratable(source(seed=3), doubles) is not None
    assert why_not_migratable(source(), doubles) is None


def test_requests_of_a_model_whose_degrees_compute_other_outputs_stay() -> None:
    sparse = model()
    sparse.hf_text_config.activation_sparsity_pattern = [0.95, 0.0]
    assert why_not_migratable(source(), sparse) == "groups of another size compute other outputs"


# ---- the batch


def added(
    history: list[int] | None, outputs: list[int], seed: int | None, noted: bytes | None = None
) -> Any:
    """Return a request's state as vLLM's batch gets it. `noted`: the state of its generator."""
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    params: Any = source(history).sampling_params
    if noted is not None:
        params.extra_args[GENERATOR_KEY] = noted
    state = SimpleNamespace(sampling_params=params, generator=generator, output_token_ids=outputs)
    batch = SimpleNamespace(vocab_size=VOCAB, requests=[])
    assert (
        add_with_history(lambda self, request: self.requests.append(request) or 3, batch, state)
        == 3
    )
    assert batch.requests == [state]
    return state


def test_a_new_request_enters_the_batch_with_its_history() -> None:
    """And with its generator advanced; unseeded ones have none."""
    state = added([7, 8, 9], [], seed=2)
    expected = torch.Generator().manual_seed(2)
    skip_draws(expected, 3, VOCAB)
    assert state.output_token_ids == [7, 8, 9]
    assert torch.equal(state.generator.get_state(), expected.get_state())
    assert added([7, 8, 9], [], seed=None).output_token_ids == [7, 8, 9]


def test_a_new_request_enters_the_batch_with_the_generator_of_its_leader() -> None:
    """It says so where steps had drafts."""
    advanced = torch.Generator().manual_seed(2)
    torch.rand(5, generator=advanced)
    noted = advanced.get_state().numpy().tobytes()
    state = added([7, 8, 9], [], seed=2, noted=noted)
    assert torch.equal(state.generator.get_state(), advanced.get_state())
    assert added([7, 8, 9], [], seed=None, noted=noted).generator is None


@pytest.mark.parametrize(("history", "outputs"), [([7, 8], [7, 8, 20]), (None, []), (None, [4])])
def test_a_request_that_comes_back_is_left_alone(
    history: list[int] | None, outputs: list[int]
) -> None:
    """After a preemption it has its outputs and its generator already; whoever has no history is as
    in vLLM.
    """
    state = added(history, outputs, seed=2)
    assert state.output_token_ids is outputs
    assert torch.equal(state.generator.get_state(), torch.Generator().manual_seed(2).get_state())


# ---- the grammar


class Grammars:
    """A StructuredOutputManager that knows one grammar: tokens below 50, and reasoning until a
    token 0.
    """

    def __init__(self) -> None:
        self.executor = ThreadPoolExecutor(1)
        self.accepted: list[tuple[list[int], list[int]]] = []

    def accept_tokens(self, request: Request, new_token_ids: list[int]) -> bool:
        """Accept tokens that the request has got."""
        structured = request.structured_output_request
        assert structured is not None
        assert structured.grammar == "compiled"
        assert list(request.output_token_ids)[-len(new_token_ids) :] == new_token_ids
        self.accepted.append((list(request.output_token_ids), new_token_ids))
        structured.reasoning_ended = structured.reasoning_ended or 0 in new_token_ids
        return max(new_token_ids) < 50


@pytest.fixture
def grammars() -> Iterator[Grammars]:
    """Yield a manager whose thread ends."""
    manager = Grammars()
    yield manager
    manager.executor.shutdown()


def begun(grammars: Grammars, history: list[int]) -> tuple[Request, Future[str]]:
    """Return a resumed request whose grammar is still being compiled."""
    sent = source(history, regex="a*")
    request = Request.from_engine_core_request(sent, None)
    assert request.structured_output_request is not None
    compiled: Future[str] = Future()
    request.structured_output_request.grammar = compiled  # type: ignore[assignment]
    resume(request, sent, grammars)
    return request, compiled


@pytest.mark.parametrize(("history", "ended"), [([7, 8, 9], False), ([7, 0, 9], True)])
def test_a_grammar_is_advanced_token_by_token_once_it_is_compiled(
    grammars: Grammars, history: list[int], ended: bool
) -> None:
    """As the outputs once came; only then the request may be scheduled."""
    request, compiled = begun(grammars, history)
    structured = request.structured_output_request
    assert structured is not None
    assert not structured.is_grammar_ready
    compiled.set_result("compiled")
    grammars.executor.submit(int).result()
    assert structured.grammar == "compiled"
    assert grammars.accepted == [
        (history[:n], [history[n - 1]]) for n in range(1, len(history) + 1)
    ]
    assert structured.reasoning_ended is ended
    assert list(request.output_token_ids) == history


def test_a_grammar_that_does_not_allow_the_history_fails_the_request(grammars: Grammars) -> None:
    """As one that cannot be compiled does: vLLM ends that request with the error."""
    request, compiled = begun(grammars, [7, 60, 9])
    compiled.set_result("compiled")
    grammars.executor.submit(int).result()
    structured = request.structured_output_request
    assert structured is not None
    problem: Any = structured.grammar
    assert isinstance(problem, ValueError)
    assert HISTORY_KEY in str(problem)


def test_a_grammar_that_cannot_be_compiled_is_still_that(grammars: Grammars) -> None:
    request, compiled = begun(grammars, [7])
    compiled.set_exception(KeyError("no such rule"))
    grammars.executor.submit(int).result()
    structured = request.structured_output_request
    assert structured is not None
    assert isinstance(structured.grammar, KeyError)
