"""Kinds of requests: a server has what it needs for those that it is asked to serve."""

from types import SimpleNamespace
from typing import Any

import pytest

from flying_serving.vllm_adapter.lora.scheduler import AdapterScheduler
from flying_serving.vllm_adapter.request_kinds import (
    adapt_runner,
    made_up_variant,
    note_of_kinds,
    post_step,
    scheduler_kinds,
)
from flying_serving.vllm_adapter.scheduler.history import nothing_to_note
from flying_serving.vllm_adapter.speculation.drafts import take_drafts
from flying_serving.vllm_adapter.speculation.scheduler import DraftingScheduler


@pytest.mark.parametrize(
    ("speculative", "lora", "kinds"),
    [
        (None, None, ()),
        ("ngram", None, (DraftingScheduler,)),
        (None, "adapters", (AdapterScheduler,)),
    ],
)
def test_a_scheduler_has_the_classes_of_the_kinds_that_are_asked_for(
    speculative: Any, lora: Any, kinds: tuple[type[Any], ...]
) -> None:
    config = SimpleNamespace(speculative_config=speculative, lora_config=lora)
    assert scheduler_kinds(config) == kinds


def test_a_runner_without_adapters_stays_as_it_is() -> None:
    runner = SimpleNamespace(lora_config=None)
    adapt_runner(runner, "nowhere", 0)
    with made_up_variant(runner) as variant:
        assert variant is None
    assert vars(runner) == {"lora_config": None}


class Drafted:
    """A scheduler of requests with `count` drafts in a step, and workers that propose some."""

    def __init__(self, count: int, proposed: Any) -> None:
        self.num_spec_tokens = count
        self.proposed = proposed
        self.asked: list[int] = []
        self.taken: list[Any] = []

    def call_lane(self, size: int, function: Any) -> Any:
        assert function is take_drafts
        self.asked.append(size)
        return self.proposed

    def update_draft_token_ids(self, drafts: Any) -> None:
        self.taken.append(drafts)


@pytest.mark.parametrize(
    ("count", "proposed", "asked", "taken"),
    [(0, "drafts", [], []), (4, "drafts", [2], ["drafts"]), (4, None, [2], [])],
)
def test_a_scheduler_gets_the_drafts_that_its_workers_propose(
    count: int, proposed: Any, asked: list[int], taken: list[Any]
) -> None:
    drafted = Drafted(count, proposed)
    post_step(drafted, drafted.call_lane, 2)
    assert (drafted.asked, drafted.taken) == (asked, taken)


def test_drafts_of_a_lane_are_those_of_its_runner() -> None:
    runner = SimpleNamespace(take_draft_token_ids=lambda: "drafts")
    assert take_drafts(SimpleNamespace(vllm_runner=runner)) == "drafts"


def test_nothing_is_noted_of_a_request_without_drafts() -> None:
    assert note_of_kinds(SimpleNamespace(speculative_config=None)) is nothing_to_note
