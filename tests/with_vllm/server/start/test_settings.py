"""The controller's settings, from what processes are told and from vLLM's configuration."""

from types import SimpleNamespace

import pytest

from flying_serving.config import KEY, Deployment, FlyingConfig, deployment_of, parse_flying
from flying_serving.controller.settings import Settings
from flying_serving.errors import ConfigError
from flying_serving.memory.kv_groups import one_group
from flying_serving.memory.peers import KVBlocks
from flying_serving.predict.work import Objective
from flying_serving.server.start.settings import settings_of
from tests.with_vllm.cli.flag_settings import settings


def controller_settings(flying: FlyingConfig, drafts: int = 0, longest: int = 64) -> Settings:
    """Return the controller's settings of two engines, by way of what their processes are told, and
    of vLLM's configuration. An engine holds nine blocks of 16 tokens.
    """
    deployment = Deployment(run_dir="/", engines=2, devices=1, group_sizes=(1, 2), flying=flying)
    told = deployment_of({KEY: deployment.model_dump()})
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=4, max_num_batched_tokens=64),
        model_config=SimpleNamespace(
            use_mla=False,
            max_model_len=longest,
            get_total_num_kv_heads=lambda: 4,
            model_arch_config=SimpleNamespace(per_layer_overrides=None),
        ),
        num_speculative_tokens=drafts,
        lora_config=SimpleNamespace(max_loras=3),
    )
    return settings_of(config, told, KVBlocks(10, 0), one_group(16))


def test_the_objective_and_the_variants_reach_the_controller() -> None:
    made = controller_settings(parse_flying(settings("--slo=ttft:500,tpot:50", "--horizon-s=7")))
    assert made.objective == Objective(7.0, ttft_s=0.5, tpot_s=0.05)
    assert made.limits.max_variants == 3


def test_a_group_without_room_for_drafts_is_refused() -> None:
    """Unless it holds the model's length."""
    assert controller_settings(FlyingConfig(), 143, 400).capacity.kv_tokens == {1: 1, 2: 145}
    assert controller_settings(FlyingConfig(), 200, 144).capacity.kv_tokens == {1: 144, 2: 288}
    with pytest.raises(ConfigError, match="num_speculative_tokens=144: must be below the 144 tok"):
        controller_settings(FlyingConfig(), 144, 400)
