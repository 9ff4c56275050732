"""Prompts share exactly the blocks that their hash ids share."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flying_lab.errors import WorkloadError
from flying_lab.workload.model import Request, Workload
from flying_lab.workload.prompts import Prompts
from tests.unit.lab.workload.workloads import workloads

VOCABULARY = range(1000, 33000)
NAME_TOKENS = 5
"""As many digits as a block's name has with 32,000 token ids."""


def shared_tokens(one: np.ndarray, other: np.ndarray) -> int:
    """Return how many leading tokens are the same."""
    length = min(len(one), len(other))
    different = np.flatnonzero(one[:length] != other[:length])
    return int(different[0]) if len(different) else length


@given(workload=workloads(), seed=st.none() | st.integers(0, 9))
def test_lengths_and_vocabulary(workload: Workload, seed: int | None) -> None:
    """Each prompt is as long as asked for, made again it is the same, and has only tokens of the
    vocabulary.
    """
    prompts, again = Prompts(workload, VOCABULARY, seed), Prompts(workload, VOCABULARY, seed)
    for request in workload.requests:
        tokens = prompts.token_ids(request)
        assert len(tokens) == request.prompt_tokens
        assert tokens.min() >= 1000 and tokens.max() < 33000
        assert np.array_equal(tokens, again.token_ids(request))


@given(workload=workloads(hashed=None))
def test_prefixes_are_shared_as_far_as_ids_are(workload: Workload) -> None:
    """At least the shared blocks, and no more than a name's length beyond them."""
    prompts = Prompts(workload, VOCABULARY)
    made = [prompts.token_ids(request) for request in workload.requests]
    for one, first in zip(workload.requests, made, strict=True):
        for other, second in zip(workload.requests, made, strict=True):
            if one is other:
                continue
            pairs = zip(one.hash_ids, other.hash_ids, strict=False)
            blocks = next(
                (n for n, (a, b) in enumerate(pairs) if a != b),
                min(len(one.hash_ids), len(other.hash_ids)),
            )
            length = min(len(first), len(second))
            least = min(blocks * workload.block_tokens, length)
            assert least <= shared_tokens(first, second) <= min(least + NAME_TOKENS - 1, length)


@given(tokens=st.integers(1, 3000), index=st.integers(0, 2**40))
def test_a_cut_keeps_the_beginning_of_a_prompt(tokens: int, index: int) -> None:
    """A shorter prompt of the same request is a prefix of the longer one."""
    workload = Workload("cut", 4, (Request(index, 0.0, 3000, 1),))
    prompts = Prompts(workload, VOCABULARY)
    whole = prompts.token_ids(workload.requests[0])
    assert np.array_equal(prompts.token_ids(Request(index, 0.0, tokens, 1)), whole[:tokens])


def test_other_seeds_give_other_prompts() -> None:
    """So a second run does not find its prompts in a server's prefix cache: no whole block of 16 is
    the same.
    """
    workload = Workload("seeds", 4, (Request(7, 0.0, 512, 1, hash_ids=(3,)),))
    one, other = (
        Prompts(workload, VOCABULARY, seed).token_ids(workload.requests[0]) for seed in (1, 2)
    )
    assert shared_tokens(one, other) < 16


def test_many_short_prompts_of_a_small_vocabulary_are_all_different() -> None:
    workload = Workload("small", 0, (Request(0, 0.0, 1, 1),))
    prompts = Prompts(workload, range(5, 7))
    made = {prompts.token_ids(Request(index, 0.0, 16, 1)).tobytes() for index in range(2000)}
    assert len(made) == 2000


@pytest.mark.parametrize("vocabulary", [range(5, 6), range(9, 3), range(-4, 100), range(0, 100, 2)])
def test_vocabularies_that_are_none(vocabulary: range) -> None:
    """At least two token ids, all of them in a row."""
    with pytest.raises(WorkloadError, match="vocabulary"):
        Prompts(Workload("none", 0, (Request(0, 0.0, 1, 1),)), vocabulary)
