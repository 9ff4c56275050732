"""Group sizes that a server offers, from the configuration alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from flying_serving.errors import ConfigError
from flying_serving.server.start.support import choose_group_sizes


def configuration(heads: int, kv_heads: int, engines: int = 4) -> Any:
    """As vLLM has it, whatever the model's own configuration calls its heads."""
    model = SimpleNamespace(
        model_arch_config=SimpleNamespace(
            total_num_attention_heads=heads, per_layer_overrides=None
        ),
        get_total_num_kv_heads=lambda: kv_heads,
        use_mla=False,
        hf_text_config=SimpleNamespace(),
        runner_type="generate",
    )
    parallel = SimpleNamespace(data_parallel_size=engines, tensor_parallel_size=1)
    return SimpleNamespace(model_config=model, parallel_config=parallel)


@pytest.mark.parametrize(
    ("heads", "refused"),
    [(8, {}), (6, {4: "6 attention heads do not divide by 4"}), (0, {})],
    ids=["all", "six", "a configuration without heads"],
)
def test_heads_are_those_that_vllm_finds(heads: int, refused: dict[int, str]) -> None:
    asked: list[int] = []

    def obstacles(_: Any, sizes: Any) -> dict[int, str]:
        asked.extend(sizes)
        return {}

    sizes = tuple(size for size in (1, 2, 4) if size not in refused)
    assert choose_group_sizes(configuration(heads, heads), None, obstacles) == (sizes, refused)
    assert tuple(asked) == sizes[1:]


def test_one_engine_needs_no_process_that_builds_the_model() -> None:
    def obstacles(*_: Any) -> dict[int, str]:
        raise AssertionError

    assert choose_group_sizes(configuration(8, 8, engines=1), None, obstacles) == ((1,), {})


def test_a_size_that_was_asked_for_is_refused_with_its_reason() -> None:
    with pytest.raises(ConfigError, match=r"^--group-sizes=4: a\.b: why$"):
        choose_group_sizes(configuration(8, 8), (1, 4), lambda *_: {4: "a.b: why"})
