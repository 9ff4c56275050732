"""The thinking budget of a request ends with it: whoever moves to its row of the batch has none of
it.
"""

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, MoveDirectionality
from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder

from flying_serving.vllm_adapter.cpu_build.sampling import sync_moves

VOCAB, START, END, THOUGHT, WORD = 8, 1, 2, 3, 4
ROWS = 5
ONE_WAY, SWAP = MoveDirectionality.UNIDIRECTIONAL, MoveDirectionality.SWAP
Sync = Callable[[ThinkingBudgetStateHolder, BatchUpdate | None], None]
STOCK = ThinkingBudgetStateHolder.sync_batch
PATCHED: Sync = partial(sync_moves, STOCK)


def made() -> ThinkingBudgetStateHolder:
    reasoning: Any = SimpleNamespace(
        reasoning_start_token_ids=[START], reasoning_end_token_ids=[END]
    )
    return ThinkingBudgetStateHolder(reasoning, ROWS, 0, torch.device("cpu"), False)


def added(row: int, budget: int | None, outputs: list[int]) -> Any:
    return row, SamplingParams(thinking_token_budget=budget), [WORD], outputs


def said_beside_a_thought(sync: Sync) -> Sequence[int]:
    """What a request without a budget says, whose neighbour in row 0 ends in a thought."""
    holder, thinking, other = made(), list[int](), list[int]()

    def step(outputs: list[list[int]], wants: list[int]) -> None:
        holder.update_state(outputs, None)
        logits = torch.zeros(len(wants), VOCAB)
        logits[range(len(wants)), wants] = 1.0
        chosen = holder.apply_to_logits(logits, False, None).argmax(dim=-1).tolist()
        for said, token in zip(outputs, chosen, strict=True):
            said.append(token)

    sync(holder, BatchUpdate(2, [], [added(0, 6, thinking), added(1, None, other)], []))
    step([thinking, other], [START, WORD])
    for _ in range(3):
        step([thinking, other], [THOUGHT, WORD])
    assert thinking == [START, THOUGHT, THOUGHT, THOUGHT]
    sync(holder, BatchUpdate(1, [], [], [(1, 0, ONE_WAY)]))
    for _ in range(12):
        step([other], [WORD])
    return other


def test_a_request_that_moves_into_the_row_of_a_thought_ends_none() -> None:
    assert said_beside_a_thought(PATCHED) == [WORD] * 16


def test_vllm_forces_the_end_of_a_thought_on_it() -> None:
    """The reason for the patch."""
    assert END in said_beside_a_thought(STOCK)


moves = st.lists(
    st.tuples(
        st.integers(0, ROWS - 1), st.integers(0, ROWS - 1), st.sampled_from([ONE_WAY, SWAP])
    ).filter(lambda move: move[0] != move[1]),
    max_size=6,
)


@given(st.lists(st.sampled_from([None, 3, 9]), min_size=ROWS, max_size=ROWS), moves)
def test_a_row_has_the_budget_of_the_request_in_it(
    budgets: list[int | None], moved: list[tuple[int, int, MoveDirectionality]]
) -> None:
    """In every order of moves; vLLM's own state otherwise."""
    holder, rows = made(), dict(enumerate(budgets))
    PATCHED(holder, BatchUpdate(ROWS, [], [added(row, rows[row], []) for row in rows], []))
    PATCHED(holder, BatchUpdate(ROWS, [], [], moved))
    for source, target, direction in moved:
        rows[target], rows[source] = rows[source], rows[target] if direction is SWAP else None
    assert {row: state["thinking_token_budget"] for row, state in holder._state.items()} == {
        row: budget for row, budget in rows.items() if budget is not None
    }


@pytest.mark.parametrize("update", [None, BatchUpdate(1, [0], [], [])], ids=["none", "removed"])
def test_a_batch_in_which_nothing_moves_is_vllms(update: BatchUpdate | None) -> None:
    holder = made()
    PATCHED(holder, BatchUpdate(1, [], [added(0, 3, [])], []))
    PATCHED(holder, update)
    assert len(holder._state) == (update is None)
