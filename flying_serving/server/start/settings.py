"""The controller's settings from vLLM's configuration and ours, and what operators are shown of it."""

import math
from dataclasses import asdict, replace
from typing import Any

from flying_serving.config import Deployment
from flying_serving.controller.controller import Controller
from flying_serving.controller.settings import Capacity, Limits, Settings
from flying_serving.controller.switches import predictions
from flying_serving.memory.peers import KVBlocks
from flying_serving.policy.policies import POLICIES
from flying_serving.policy.snapshot import Decision
from flying_serving.predict.work import Objective


def settings_of(vllm_config: Any, deployment: Deployment, blocks: KVBlocks) -> Settings:
    """The settings of a server, from the number of KV blocks that every engine has at least."""
    flying = deployment.flying
    policy = POLICIES[flying.policy]
    sizes = deployment.group_sizes
    spare: frozenset[int] = frozenset()
    if policy.pinned_size is not None:
        pinned = policy.pinned_size(sizes)
        spare = frozenset({1} - {pinned}) if deployment.survives else frozenset()
        sizes = (*spare, pinned)
    scheduler = vllm_config.scheduler_config
    capacity = Capacity.of(
        sizes,
        blocks.own,
        vllm_config.cache_config.block_size,
        deployment.devices,
        vllm_config.model_config.get_total_num_kv_heads(),
        extra=blocks.extra if max(sizes) == deployment.widest else 0,
    )
    capacity = replace(capacity, spare=spare)
    limits = Limits(
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        capped=policy.splits
        or flying.max_queue_wait_s is not None
        or (policy.name != "manual" and policy.pinned_size is None),
    )
    return Settings(
        engines=deployment.engines,
        capacity=capacity,
        policy=policy,
        limits=limits,
        objective=Objective(flying.horizon_s, *flying.slo_s),
        weave_steps=flying.weave_steps,
        most_waiting=flying.max_waiting_requests,
        most_waiting_tokens=flying.max_waiting_tokens,
        most_wait_s=math.inf if flying.max_queue_wait_s is None else flying.max_queue_wait_s,
        aging_s=flying.priority_aging_s,
        dry_run=flying.policy_dry_run,
        tbt_slo_s=math.inf if flying.tbt_slo_ms is None else flying.tbt_slo_ms / 1e3,
    )


def describe(controller: Controller, deployment: Deployment) -> dict[str, Any]:
    """What `GET /flying/status` shows of the controller."""
    return {
        "policy": controller.settings.policy.name,
        "layout": controller.layout.to_lists(),
        "group_sizes": list(deployment.group_sizes),
        "not_offered": {str(size): reason for size, reason in deployment.not_offered.items()},
        "devices_per_engine": deployment.devices,
        "capacity_tokens": {str(size): tokens for size, tokens in controller.settings.capacity.tokens.items()},
        "lent_capacity_tokens": controller.settings.capacity.lent_tokens or None,
        "weights": {
            ",".join(map(str, group)): stage.value
            for group, stage in (controller.lending.stages if controller.lending.lends else {}).items()
        },
        "step_cost": {str(size): asdict(lane.cost) for size, lane in controller.lanes().items()},
        "migration_cost": {str(size): asdict(cost) for size, cost in controller.migrates.items()},
        "splits": asdict(controller.splits.counts),
        "last_decision": None if controller.last_decision is None else _decision(controller.last_decision),
        "would_do": [_decision(decision) for decision in controller.would_do],
    }


def _decision(one: Decision) -> dict[str, Any]:
    return {"to": one.layout.to_lists(), "mode": one.mode, "is_made": one.is_made, **predictions(one)}
