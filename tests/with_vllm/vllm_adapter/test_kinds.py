"""Kinds of requests: what a server has for those that it is asked to serve, and nothing for others."""

from types import SimpleNamespace
from typing import Any

import pytest

from flying_serving.vllm_adapter.kinds import adapt_runner, scheduler_kinds, steps_of_all_kinds
from flying_serving.vllm_adapter.lora.scheduler import AdapterScheduler
from flying_serving.vllm_adapter.speculation.scheduler import DraftingScheduler
from flying_serving.memory.kv_groups import one_group


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
    with steps_of_all_kinds(runner) as check_steps:
        step = next(check_steps(2, 100, one_group(16)))
    assert [new.lora_request for new in step.scheduled_new_reqs] == [None, None]
    assert vars(runner) == {"lora_config": None}
