"""Drafts, and the steps of a request that are told from its tokens."""

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.spec_decode.ngram_proposer import NgramProposer

from flying_serving.vllm_adapter.keys import GENERATOR_KEY
from flying_serving.vllm_adapter.speculation.drafts import Drafter, drafts_checked
from flying_serving.vllm_adapter.speculation.draws import skip_draws

LEAST, MOST, COUNT, LONGEST, VOCAB = 1, 3, 4, 64, 50
CONFIG: Any = SimpleNamespace(
    speculative_config=SimpleNamespace(
        prompt_lookup_min=LEAST, prompt_lookup_max=MOST, num_speculative_tokens=COUNT
    ),
    model_config=SimpleNamespace(max_model_len=LONGEST, get_vocab_size=lambda: VOCAB),
    scheduler_config=SimpleNamespace(max_num_seqs=4),
    parallel_config=SimpleNamespace(tensor_parallel_size=1),
)
TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=LONGEST - 1)


@pytest.fixture(scope="module")
def drafter() -> Drafter:
    return Drafter(CONFIG)


@pytest.fixture(scope="module")
def proposer() -> NgramProposer:
    return NgramProposer(CONFIG)


@pytest.mark.deep
@pytest.mark.filterwarnings("ignore::numba.core.errors.NumbaPendingDeprecationWarning")
@given(TOKENS)
def test_drafts_are_those_of_the_proposer_and_the_scheduler(
    drafter: Drafter, proposer: NgramProposer, tokens: list[int]
) -> None:
    """vLLM's scheduler leaves room for the token behind the drafts."""
    row = np.zeros((1, LONGEST), dtype=np.int32)
    row[0, : len(tokens)] = tokens
    [proposed] = proposer.propose(COUNT, [[tokens[-1]]], np.array([len(tokens)]), row)
    assert drafter.propose(tokens) == proposed[: max(0, LONGEST - len(tokens) - 1)]


@given(st.integers(0, 2**32), st.integers(1, 8), st.integers(1, 40))
def test_steps_are_told_from_tokens(seed: int, prompt: int, steps: int) -> None:
    """A step accepts some drafts. It then has another token than the next draft, or any token."""
    draw = random.Random(seed)
    proposals: dict[int, list[int]] = {}

    def propose(end: int) -> list[int]:
        if end not in proposals:
            proposals[end] = [draw.randrange(4) for _ in range(draw.randrange(4))]
        return proposals[end]

    tokens = [draw.randrange(4) for _ in range(prompt + 1)]
    expected = [0]
    for _ in range(steps):
        drafts = propose(len(tokens))
        expected.append(len(drafts))
        accepted = draw.randint(0, len(drafts))
        rejected = drafts[accepted : accepted + 1]
        tokens += drafts[:accepted]
        tokens.append(draw.choice([token for token in range(4) if token not in rejected]))
    assert drafts_checked(tokens, prompt, propose) == expected


@given(TOKENS)
def test_a_replay_proposes_what_the_steps_have_proposed(
    drafter: Drafter, tokens: list[int]
) -> None:
    propose = drafter.replay(tokens)
    for end in range(1, len(tokens) + 1):
        assert propose(end) == drafter.propose(tokens[:end])


@pytest.mark.parametrize("outputs", [4, 40])
def test_a_replay_searches_no_tokens(drafter: Drafter, outputs: int) -> None:
    """A search for each step would take a time that grows with the square of the outputs."""
    searched: list[int] = []
    find = drafter._find
    params: Any = SimpleNamespace(seed=1, extra_args={})
    tokens = [place % 7 for place in range(20 + outputs)]
    request = SimpleNamespace(sampling_params=params, all_token_ids=tokens, num_prompt_tokens=20)

    def noted(searched_tokens: Any, *args: Any) -> Any:
        searched.append(len(searched_tokens))
        return find(searched_tokens, *args)

    drafter._find = noted
    try:
        drafter.note_generator(request)
    finally:
        drafter._find = find
    assert searched == []
    assert params.extra_args[GENERATOR_KEY]


def test_a_request_without_a_seed_has_no_note(drafter: Drafter) -> None:
    params = SimpleNamespace(seed=None, extra_args={})
    drafter.note_generator(SimpleNamespace(sampling_params=params))
    assert params.extra_args == {}


def test_only_drafts_that_a_grammar_allows_are_counted(drafter: Drafter) -> None:
    params: Any = SimpleNamespace(seed=1, extra_args={})
    request = SimpleNamespace(
        sampling_params=params, all_token_ids=[1, 2, 1, 2, 1, 2], num_prompt_tokens=3
    )
    ends = []

    def allowed(end: int, drafts: list[int]) -> list[int]:
        ends.append(end)
        return drafts[:1]

    drafter.note_generator(request, allowed)
    assert ends == [4]
    expected = torch.Generator().manual_seed(1)
    skip_draws(expected, 2, VOCAB, [1])
    assert params.extra_args[GENERATOR_KEY] == expected.get_state().numpy().tobytes()
