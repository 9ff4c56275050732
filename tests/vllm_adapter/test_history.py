"""Histories: what the scheduler, the batch, the random numbers and the grammar of a migrated
request see of them.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.request import Request
from vllm.v1.sample.logits_processor import (
    AdapterLogitsProcessor,
    BatchUpdate,
    LogitBiasLogitsProcessor,
    LogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)
from vllm.v1.sample.ops.topk_topp_sampler import random_sample
from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder

from flying_serving.vllm_adapter.history import (
    add_with_history,
    history_of,
    resume,
    skip_draws,
    stateful_processors,
    why_not_migratable,
)
from flying_serving.vllm_adapter.keys import HISTORY_KEY

VOCAB = 97


def source(history: list[int] | None = None, **fields: Any) -> EngineCoreRequest:
    """Return what a client sends: five tokens of prompt, and the history."""
    regex = fields.pop("regex", None)
    params = SamplingParams(
        structured_outputs=StructuredOutputsParams(regex=regex) if regex else None,
        extra_args=None if history is None else {HISTORY_KEY: history},
        **fields,
    )
    return EngineCoreRequest("a", [1, 2, 3, 4, 5], None, params, None, 0.0, None, None, None)


def model(*processors: type[LogitsProcessor] | str, use_fp64_gumbel: bool = False) -> Any:
    """Return what is asked of a model's configuration; `processors`: of users."""
    return SimpleNamespace(
        use_fp64_gumbel=use_fp64_gumbel, logits_processors=list(processors) or None
    )


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
    assert (request.num_prompt_tokens, request.num_output_tokens, request.num_tokens) == (5, 3, 8)
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


# ---- its logits processors


class Counting(AdapterLogitsProcessor):
    """Counts how often it was asked, which is not in the tokens of a request."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(
        self, params: SamplingParams
    ) -> Callable[[list[int], torch.Tensor], torch.Tensor]:
        asked = count()

        def fall(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            return logits - next(asked)

        return fall


class Looking(Counting):
    """Says that it goes by the outputs alone."""

    follows_outputs = True


def test_a_request_stays_whose_logits_processor_may_hold_a_state() -> None:
    assert stateful_processors(model(Looking, Counting)) == ["Counting"]
    why = why_not_migratable(source(), model(Looking, Counting))
    assert why == "a logits processor may hold a state that is not in its tokens"


@pytest.mark.parametrize(
    "processors", [[], [Looking], ["tests.stock.force:ForceTokens"]], ids=["none", "class", "name"]
)
def test_a_request_whose_logits_processors_follow_its_outputs_migrates(
    processors: list[Any],
) -> None:
    assert stateful_processors(model(*processors)) == []
    assert why_not_migratable(source(), model(*processors)) is None


def biases(
    processor: LogitsProcessor, params: SamplingParams, outputs: Sequence[int], begins_with: int
) -> list[list[float]]:
    """What a processor makes of zeros for each token after a history of the first `begins_with`
    outputs.
    """
    had = list(outputs[:begins_with])
    update: BatchUpdate | None = BatchUpdate(1, [], [(0, params, [1, 2, 3], had)], [])
    made = []
    for token in outputs[begins_with:]:
        processor.update_state(update)
        made.append(processor.apply(torch.zeros(1, VOCAB))[0].tolist())
        had.append(token)
        update = None
    return made


@pytest.mark.parametrize(
    "kind", [MinTokensLogitsProcessor, LogitBiasLogitsProcessor, MinPLogitsProcessor]
)
@pytest.mark.parametrize("kept", [1, 4, 5, 7])
def test_vllms_own_logits_processors_follow_a_history(
    kind: type[LogitsProcessor], kept: int
) -> None:
    """One of `min_tokens` that ends before the history does, in it, or after it."""
    params = SamplingParams(min_tokens=5, stop_token_ids=[6], logit_bias={3: 2.0}, min_p=0.5)
    config: Any = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=4))

    def make() -> LogitsProcessor:
        return kind(config, torch.device("cpu"), False)

    outputs = range(10, 20)
    assert biases(make(), params, outputs, kept) == biases(make(), params, outputs, 0)[kept:]


def forced(outputs: Sequence[int], begins_with: int, ends: list[int]) -> list[int]:
    """Tokens under a thinking budget of four, behind the first `begins_with`: those of `outputs`,
    or what is forced.
    """
    reasoning: Any = SimpleNamespace(reasoning_start_token_ids=[4], reasoning_end_token_ids=ends)
    holder = ThinkingBudgetStateHolder(reasoning, 1, 0, torch.device("cpu"), False)
    had = list(outputs[:begins_with])
    params = SamplingParams(thinking_token_budget=4)
    holder.sync_batch(BatchUpdate(1, [], [(0, params, [1, 4], had)], []))
    for token in outputs[begins_with:]:
        holder.update_state([had], None)
        logits = torch.zeros(1, VOCAB)
        logits[0, token] = 1.0
        had.append(int(holder.apply_to_logits(logits, False, None)[0].argmax()))
    return had[begins_with:]


def test_what_is_left_of_a_thinking_budget_does_not_follow_from_a_history() -> None:
    """vLLM's holder begins with the prompt: it forces the end again that the history has begun. So
    they stay.
    """
    thoughts, ends = [5] * 12, [7, 8, 9]
    undisturbed = forced(thoughts, 0, ends)
    assert undisturbed[:8] == [5, 5, 5, 5, 7, 8, 9, 5]
    assert forced(undisturbed, 5, ends)[:3] != undisturbed[5:8]


# ---- its random numbers


@given(st.integers(0, 2**31 - 1), st.integers(0, 40), st.integers(1, 40))
def test_draws_are_skipped_as_the_sampler_of_the_cpu_makes_them(
    seed: int, count: int, more: int
) -> None:
    """One integer for each token (TopKTopPSampler.forward_cpu)."""

    def draw(generator: torch.Generator) -> int:
        return int(torch.randint(0, 2**31, (1,), generator=generator, dtype=torch.long).item())

    undisturbed, resumed = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(seed)
    drawn = [draw(undisturbed) for _ in range(count + more)]
    skip_draws(resumed, count, VOCAB)
    assert [draw(resumed) for _ in range(more)] == drawn[count:]


def test_the_sampler_of_the_cpu_draws_what_is_skipped() -> None:
    """vLLM's own, over rows of which two have seeds."""
    from vllm.platforms import current_platform
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

    current_platform.import_kernels()
    sampler, logits = (
        TopKTopPSampler(),
        torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(0)),
    )

    def sample(generators: dict[int, torch.Generator]) -> list[int]:
        return [int(token) for token in sampler(logits.clone(), generators, None, None)[0][[0, 2]]]

    undisturbed = {0: torch.Generator().manual_seed(5), 2: torch.Generator().manual_seed(6)}
    tokens = [sample(undisturbed) for _ in range(30)]
    for kept in (1, 7, 29):
        resumed = {0: torch.Generator().manual_seed(5), 2: torch.Generator().manual_seed(6)}
        for generator in resumed.values():
            skip_draws(generator, kept, VOCAB)
        assert [sample(resumed) for _ in range(30 - kept)] == tokens[kept:]


class OffsetGenerator:
    """A CPU generator that counts its steps, as CUDA's does, and can be set to a step.

    Exponential noise for n tokens takes n steps here.
    """

    device = SimpleNamespace(type="cuda")

    def __init__(self) -> None:
        self.offset = 4

    def get_offset(self) -> int:
        """Return the steps so far."""
        return self.offset

    def set_offset(self, offset: int) -> None:
        """Go to a step."""
        self.offset = offset


@pytest.mark.parametrize("count", [1, 2, 7, 1000])
def test_draws_are_skipped_by_their_steps_on_cuda(
    monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """As many for each as one draw over the vocabulary takes, in vLLM's shape and type."""
    asked = []

    class Noise:
        def exponential_(self, generator: OffsetGenerator) -> None:
            generator.offset += VOCAB

    def empty(*shape: int, **options: Any) -> Noise:
        asked.append((shape, options))
        return Noise()

    generator: Any = OffsetGenerator()
    monkeypatch.setattr(torch, "empty", empty)
    skip_draws(generator, count, VOCAB)
    assert generator.offset == 4 + count * VOCAB
    assert asked == [((VOCAB,), {"device": generator.device})]


def test_vllm_draws_noise_of_the_type_that_is_skipped() -> None:
    """`random_sample` draws as many numbers of the default type as the vocabulary has tokens."""
    seeded, plain = torch.Generator().manual_seed(9), torch.Generator().manual_seed(9)
    random_sample(torch.full((1, VOCAB), 1 / VOCAB), {0: seeded})
    torch.empty(VOCAB).exponential_(generator=plain)
    assert torch.equal(seeded.get_state(), plain.get_state())


# ---- the batch


def added(history: list[int] | None, outputs: list[int], seed: int | None) -> Any:
    """Return a request's state as vLLM's batch gets it."""
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    params = source(history).sampling_params
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
