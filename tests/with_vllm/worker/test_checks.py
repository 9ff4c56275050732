"""How many made-up requests a check has, by the memory that there is."""

from types import SimpleNamespace
from typing import Any

import pytest

from flying_serving.errors import ConfigError
from flying_serving.memory.kv_groups import KVGroup, KVGroups, one_group
from flying_serving.worker.checks import most_requests

HYBRID = KVGroups((KVGroup(96), KVGroup(1024, has_state=True), KVGroup(1024, has_state=True)))


def lane(groups: KVGroups) -> Any:
    limits = SimpleNamespace(max_num_seqs=8, max_num_batched_tokens=2048)
    return SimpleNamespace(config=SimpleNamespace(scheduler_config=limits), groups=groups)


@pytest.mark.parametrize(("groups", "blocks", "requests"), [(one_group(32), 5, 4), (HYBRID, 7, 2)])
def test_each_request_has_a_block_of_each_group(
    groups: KVGroups, blocks: int, requests: int
) -> None:
    assert most_requests(lane(groups), blocks) == requests


def test_memory_for_no_request_is_refused() -> None:
    says = "--kv-cache-memory-bytes: memory for 3 KV blocks, and this model needs at least 4"
    with pytest.raises(ConfigError, match=says):
        most_requests(lane(HYBRID), blocks=3)
