"""Flags of vLLM that have another default for engines that form groups: how many requests a step
takes on CUDA, and eager lanes on the CPU.
"""

import argparse
import logging

import pytest
from vllm.config import CompilationConfig, CompilationMode
from vllm.platforms import current_platform

from flying_serving.log import logger
from flying_serving.server.start.defaults import limit_requests, stay_eager_on_cpu


@pytest.mark.parametrize(
    ("is_cuda", "engines", "given", "step_tokens", "expected"),
    [
        (True, 2, None, None, 256),
        (True, 8, None, 8192, 256),
        (True, 2, None, 64, 64),
        (True, 2, 1024, None, 1024),
        (True, 1, None, None, None),  # vLLM's own
        (False, 2, None, None, None),
    ],
)
def test_requests_at_a_time_are_fewer_where_lanes_have_memory_for_each(
    monkeypatch: pytest.MonkeyPatch,
    is_cuda: bool,
    engines: int,
    given: int | None,
    step_tokens: int | None,
    expected: int | None,
) -> None:
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: is_cuda)
    args = argparse.Namespace(
        max_num_seqs=given, data_parallel_size=engines, max_num_batched_tokens=step_tokens
    )
    limit_requests(args)
    assert args.max_num_seqs == expected


@pytest.mark.parametrize(
    ("argv", "given", "is_eager", "is_said"),
    [
        ([], False, True, True),
        (["--enforce-eager"], True, True, False),
        (["--no-enforce-eager"], False, False, False),
    ],
)
def test_lanes_are_eager_on_the_cpu_unless_a_user_says_no(
    argv: list[str],
    given: bool,
    is_eager: bool,
    is_said: bool,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logger, "propagate", True)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level(logging.INFO)
    args = argparse.Namespace(enforce_eager=given, compilation_config=CompilationConfig())
    stay_eager_on_cpu(args, argv)
    assert args.enforce_eager == is_eager
    assert ("--enforce-eager: set, as starts are shorter so" in caplog.text) == is_said


def test_lanes_are_not_made_eager_where_a_user_has_chosen_a_mode() -> None:
    compiled = CompilationConfig(mode=CompilationMode.VLLM_COMPILE)
    args = argparse.Namespace(enforce_eager=False, compilation_config=compiled)
    stay_eager_on_cpu(args, ["-cc.mode=3"])
    assert not args.enforce_eager
