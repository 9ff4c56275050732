"""Settings of vLLM that follow from recurrent state."""

from types import SimpleNamespace
from typing import Any

import pytest

from flying_serving.vllm_adapter.recurrent.models import cache_no_states, refusal_of_itself


def configured(*, has_state: bool, caches: bool = True) -> Any:
    """A configuration as vLLM has it before our changes."""
    model = SimpleNamespace(
        is_hybrid=has_state, has_inner_state=False, architecture="X", max_model_len=512
    )
    cache = SimpleNamespace(
        enable_prefix_caching=caches, mamba_cache_mode="align", mamba_block_size=64
    )
    return SimpleNamespace(model_config=model, cache_config=cache)


def test_no_prefix_of_a_state_is_cached() -> None:
    config = configured(has_state=True)
    cache_no_states(config)
    cache = {"enable_prefix_caching": False, "mamba_cache_mode": "none", "mamba_block_size": 512}
    assert vars(config.cache_config) == cache


@pytest.mark.parametrize(("has_state", "caches"), [(False, True), (True, False)])
def test_other_caches_stay_as_they_are(has_state: bool, caches: bool) -> None:
    config = configured(has_state=has_state, caches=caches)
    before = dict(vars(config.cache_config))
    cache_no_states(config)
    assert vars(config.cache_config) == before


@pytest.mark.parametrize(
    ("problem", "given", "is_vllms"),
    [
        ("--mamba-block-size can only be set with a cache", None, True),
        ("--mamba-block-size can only be set with a cache", 32, False),
        ("--block-size=3: must be more", None, False),
    ],
)
def test_a_flag_that_vllm_has_set_itself_is_told_from_a_users(
    problem: str, given: int | None, is_vllms: bool
) -> None:
    said = refusal_of_itself(problem, SimpleNamespace(mamba_block_size=given))
    assert said.endswith(problem) is is_vllms
