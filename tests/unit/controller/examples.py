"""Requests and layouts of servers of two engines."""

from dataclasses import replace

from flying_serving.controller.requests import RequestSpec
from flying_serving.controller.settings import Capacity
from flying_serving.layout.groups import Layout
from flying_serving.predict.migrations import MigrationCost
from tests.unit.controller.model_settings import settings
from tests.unit.controller.model_shell import ModelShell
from tests.unit.policy.costs import costs

NARROW, WIDE = Layout.uniform(2, 1), Layout.uniform(2, 2)
SHORT = RequestSpec(10, 30, 20)
OPEN_ENDED = RequestSpec(40, 41, 400)
HURRIED = RequestSpec(10, 30, 20, deadline_s=1.0)


def manual(capped: bool = False) -> ModelShell:
    """Return a server of two engines whose layout an operator chooses."""
    return ModelShell(settings("manual", 2, capped=capped))


def roomy(policy: str, *, dry_run: bool = False) -> ModelShell:
    """Return a server of two engines with room for long requests, on which KV migrates."""
    small = settings(policy, 2, max_num_batched_tokens=2048, dry_run=dry_run)
    sizes = small.capacity.kv_tokens
    capacity = Capacity(
        {size: 10_000 * size for size in sizes}, 1, {size: 16 * size for size in sizes}
    )
    shell = ModelShell(replace(small, capacity=capacity), costs(tuple(capacity.kv_tokens)))
    shell.controller.state.migrates = {2: MigrationCost(1e-4, 1e-7)}
    return shell
