"""Variables by which vLLM or torch would run what lanes cannot share, or place workers."""

import logging
import os
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import ParallelConfig
from vllm.utils.ompmultiprocessing import OMPProcessManager

from flying_serving.config import Collectives
from flying_serving.errors import ConfigError
from flying_serving.log import logger
from flying_serving.placement.plan import BIND
from flying_serving.server.start.environment import (
    FLASHINFER,
    refuse_expandable_segments,
    sum_without_flashinfer,
    workers_place_themselves,
)

SIMULATED = "VLLM_CPU_SIM_MULTI_NUMA"


def test_flashinfers_all_reduce_is_off_where_groups_of_two_sizes_sum(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logger, "propagate", True)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level(logging.INFO)
    environment: dict[str, str] = {}
    sum_without_flashinfer(environment, (1, 2, 4), 1, "nccl")
    assert environment == {FLASHINFER: "0"}
    assert "VLLM_ALLREDUCE_USE_FLASHINFER=0: FlashInfer's all-reduce cannot serve" in caplog.text


@pytest.mark.parametrize(
    ("sizes", "devices", "collectives"),
    [
        ((1,), 1, "nccl"),
        ((1, 2), 1, "nccl"),
        ((1,), 2, "nccl"),
        ((1, 2, 4), 1, "staged"),
        ((1, 2, 4), 1, "pynccl"),
    ],
)
@pytest.mark.parametrize("given", [{}, {FLASHINFER: "1"}])
def test_flashinfer_is_the_users_choice_where_one_group_uses_it(
    sizes: tuple[int, ...], devices: int, collectives: Collectives, given: dict[str, str]
) -> None:
    environment = dict(given)
    sum_without_flashinfer(environment, sizes, devices, collectives)
    assert environment == given


@pytest.mark.parametrize(("sizes", "devices"), [((1, 2, 4), 1), ((1, 2), 2)])
def test_flashinfer_that_a_user_turns_on_for_several_sizes_is_refused(
    sizes: tuple[int, ...], devices: int
) -> None:
    says = r"^VLLM_ALLREDUCE_USE_FLASHINFER=1: .* groups of \[2, 4\] devices; leave it unset"
    with pytest.raises(ConfigError, match=says):
        sum_without_flashinfer({FLASHINFER: "1"}, sizes, devices, "nccl")


def test_flashinfer_that_a_user_turns_off_stays_off() -> None:
    environment = {FLASHINFER: "0"}
    sum_without_flashinfer(environment, (1, 2, 4), 1, "nccl")
    assert environment == {FLASHINFER: "0"}


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
@pytest.mark.parametrize(
    "value", ["expandable_segments:True", "max_split_size_mb:64, expandable_segments:true"]
)
def test_expandable_segments_are_refused_by_name_and_value(name: str, value: str) -> None:
    says = f"^{name}={value}: expandable_segments must not be True"
    with pytest.raises(ConfigError, match=says):
        refuse_expandable_segments({name: value})


@pytest.mark.parametrize("value", ["", "expandable_segments:False", "max_split_size_mb:64"])
def test_other_settings_of_the_allocator_are_taken(value: str) -> None:
    refuse_expandable_segments({"PYTORCH_CUDA_ALLOC_CONF": value})


@pytest.mark.parametrize("given", [{}, {BIND: "0|1"}, {BIND: "auto", SIMULATED: "1"}])
def test_vllm_places_no_worker_while_engines_start(given: dict[str, str]) -> None:
    environment = given | {"other": "1"}
    with pytest.raises(ConfigError), workers_place_themselves(environment):
        assert environment == {BIND: "nobind", "other": "1"}
        raise ConfigError("an engine could not start")
    assert environment == given | {"other": "1"}


def test_vllms_executor_reads_that_it_places_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BIND, "0|1")
    monkeypatch.setenv(SIMULATED, "1")
    parallel = ParallelConfig()
    config: Any = SimpleNamespace(parallel_config=parallel, kv_transfer_config=None)
    with workers_place_themselves(os.environ):
        assert OMPProcessManager(config).skip_setup
