"""The table of features: each pair that it has is refused, and no other."""

from itertools import chain, combinations
from types import SimpleNamespace
from typing import Any

import pytest

from flying_serving.errors import Unsupported
from flying_serving.server.start import capabilities
from flying_serving.server.start.capabilities import (
    ADAPTERS,
    COMPILED,
    DEVICES,
    EXCLUSIONS,
    GPUS,
    KV_8_BITS,
    LATENT,
    LENDING,
    NEVER,
    OWN_SCHEDULER,
    POOLING,
    QUANTIZED,
    RECURRENT,
    SEEING,
    SPECULATION,
    TBT_SLO,
    V2_RUNNER,
    WHOLE_PROMPTS,
    Feature,
)
from tests.with_vllm.server.errors.starts import adapters, features, speculation

ASKING: dict[Feature, dict[str, Any]] = {
    GPUS: {},
    POOLING: {"runner_type": "pooling"},
    LATENT: {"use_mla": True},
    RECURRENT: {"has_inner_state": True},
    SEEING: {"is_multimodal_model": True},
    QUANTIZED: {"quantization": "fp8"},
    KV_8_BITS: {"cache_dtype": "fp8"},
    DEVICES: {"tensor_parallel_size": 2},
    V2_RUNNER: {"v2": True},
    COMPILED: {"enforce_eager": False},
    WHOLE_PROMPTS: {"chunked": False},
    OWN_SCHEDULER: {"scheduler_cls": "mine.Scheduler"},
    ADAPTERS: {"lora": adapters()},
    SPECULATION: {"speculative": speculation()},
    LENDING: {"lend_weights": True},
    TBT_SLO: {"tbt_slo_ms": 50.0},
}
"""The settings that ask for a feature. The platform of GPUs is not among them."""
PAIRS = {frozenset((pair.first, pair.second)) for pair in EXCLUSIONS}


def _start(monkeypatch: pytest.MonkeyPatch, *asked: Feature) -> None:
    on_cpu = GPUS not in asked
    monkeypatch.setattr(capabilities, "current_platform", SimpleNamespace(is_cpu=lambda: on_cpu))
    features(**{key: value for feature in asked for key, value in ASKING[feature].items()})


def _name(feature: Feature) -> str:
    return feature.name


def test_each_pair_is_there_once_and_of_features_that_are_tried() -> None:
    assert len(PAIRS) == len(EXCLUSIONS)
    assert frozenset().union(*PAIRS) == set(ASKING)


@pytest.mark.parametrize("feature", ASKING, ids=_name)
def test_a_feature_alone_is_served(feature: Feature, monkeypatch: pytest.MonkeyPatch) -> None:
    _start(monkeypatch, feature)


@pytest.mark.parametrize(("one", "other"), [*combinations(ASKING, 2)], ids=_name)
def test_features_that_exclude_each_other_are_refused(
    one: Feature, other: Feature, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line begins with the flag of one of them. Others are served together."""
    if frozenset((one, other)) not in PAIRS:
        _start(monkeypatch, one, other)
        return
    with pytest.raises(Unsupported) as refused:
        _start(monkeypatch, one, other)
    assert str(refused.value).startswith(tuple(f.flag for f in (one, other) if f.flag))


@pytest.mark.parametrize(
    ("features", "says"),
    [
        ((ADAPTERS, GPUS), "--enable-lora: LoRA on this kind of device cannot be served"),
        ((SPECULATION, GPUS), "--speculative-config: speculation on this kind of device cannot"),
        (
            (TBT_SLO, WHOLE_PROMPTS),
            "--tbt-slo-ms=50.0: prompts are computed in chunks; chunked prefill is off",
        ),
    ],
)
def test_the_line_says_what_excludes_what(
    features: tuple[Feature, Feature], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are rows of docs/errors.md."""
    with pytest.raises(Unsupported, match=says):
        _start(monkeypatch, *features)


def test_what_is_never_served_has_a_flag_if_it_is_refused_here() -> None:
    elsewhere = Feature("").is_asked
    rows = chain.from_iterable(NEVER.values())
    assert [row.name for row in rows if bool(row.flag) == (row.is_asked is elsewhere)] == []
