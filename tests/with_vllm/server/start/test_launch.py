"""What `prepare` decides before the engines start."""

import logging
from types import SimpleNamespace

import pytest

from flying_serving.config import Collectives, FlyingConfig
from flying_serving.errors import ConfigError
from flying_serving.log import logger
from flying_serving.placement.plan import WITHOUT_EFFECT
from flying_serving.server.start.launch import placements_of, survives


@pytest.mark.parametrize(
    ("engines", "options", "expected"),
    [
        (2, {}, True),
        (1, {}, False),
        (4, {"lend_weights": True}, False),
        (4, {"min_engines": 4}, True),
    ],
)
@pytest.mark.parametrize("collectives", ["shm", "staged", "pynccl"])
def test_a_server_survives_where_the_others_can_do_without(
    engines: int, options: dict[str, object], expected: bool, collectives: Collectives
) -> None:
    assert survives(FlyingConfig.model_validate(options), engines, collectives) == expected


@pytest.mark.parametrize("collectives", ["gloo", "nccl"])
def test_a_server_of_one_torch_world_does_not_survive(collectives: Collectives) -> None:
    assert not survives(FlyingConfig(), 4, collectives)


def test_more_engines_than_there_are_cannot_be_needed() -> None:
    with pytest.raises(ConfigError, match=r"^--min-engines=3: at most 2, --data-parallel-size$"):
        survives(FlyingConfig(min_engines=3), 2, "shm")


def test_an_engine_is_lost_before_others_give_up_waiting_for_it() -> None:
    with pytest.raises(
        ConfigError, match=r"^--engine-timeout-s=70: at most 60, --collective-timeout-s$"
    ):
        survives(FlyingConfig(engine_timeout_s=70), 2, "shm")
    survives(FlyingConfig(engine_timeout_s=70, collective_timeout_s=70), 2, "shm")


@pytest.mark.parametrize("variable", WITHOUT_EFFECT)
def test_variables_of_vllm_without_an_effect_are_named(
    variable: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logger, "propagate", True)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    monkeypatch.setenv(variable, "1")
    placements_of(SimpleNamespace(data_parallel_size=1, tensor_parallel_size=1))
    assert f"{variable}: no effect" in caplog.text
