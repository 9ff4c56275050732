"""The controller's settings from vLLM's configuration and ours."""

import math
from dataclasses import replace
from typing import Any

from flying_serving.config import Deployment
from flying_serving.controller.settings import Capacity, Limits, Settings
from flying_serving.errors import ConfigError
from flying_serving.memory.kv_groups import KVGroups
from flying_serving.memory.peers import KVBlocks
from flying_serving.policy.policies import POLICIES
from flying_serving.predict.work import Objective
from flying_serving.vllm_adapter.kv.heads import fewest_kv_heads
from flying_serving.vllm_adapter.scheduler.limits import step_tokens


def settings_of(
    vllm_config: Any, deployment: Deployment, blocks: KVBlocks, groups: KVGroups
) -> Settings:
    """Return the settings of a server, from the number of KV blocks that every engine has at
    least, and the KV groups of lane 1.

    A group of engines holds what is left beside the state of one request. Each further request
    takes the room of a state as well.
    """
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
        blocks.own - groups.fixed_blocks,
        groups.block_tokens,
        deployment.devices,
        fewest_kv_heads(vllm_config.model_config),
        extra=blocks.extra if max(sizes) == deployment.widest else 0,
    )
    most, longest = step_tokens(vllm_config), vllm_config.model_config.max_model_len
    fewest = min(capacity.kv_tokens.values())
    if most > 1 and fewest < min(most, longest):
        raise ConfigError(
            f"--speculative-config: num_speculative_tokens={most - 1}: must be below the {fewest} "
            "tokens that the smallest group holds"
        )
    capacity = replace(
        capacity.with_steps(most, longest), spare=spare, request_blocks=groups.fixed_blocks
    )
    limits = Limits(
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        capped=policy.splits
        or flying.max_queue_wait_s is not None
        or (policy.pinned_size is None and not policy.is_operated),
        max_variants=0 if vllm_config.lora_config is None else vllm_config.lora_config.max_loras,
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
