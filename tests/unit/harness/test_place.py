"""The flags and variables that servers of tests get on the CPU and on one GPU."""

import sys

import pytest

from harness.forked import forked
from harness.live import FLAGS
from harness.place import SETTING, Place, environment, place, server_flags, stock_flags


def test_place_is_the_cpu_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SETTING, raising=False)
    assert place() is Place.CPU


def test_place_is_the_named_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SETTING, "one-gpu")
    assert place() is Place.ONE_GPU


def test_unknown_place_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SETTING, "tpu")
    with pytest.raises(ValueError, match="'tpu': must be one of cpu, cpu-staged, one-gpu"):
        place()


def test_flags_on_the_cpu_are_those_given() -> None:
    assert server_flags(FLAGS, 4, Place.CPU) == list(FLAGS)


def test_staged_flags_copy_as_engines_of_one_gpu() -> None:
    more = ["--engines-per-device=4", "--cpu-collectives=staged"]
    assert server_flags(["--a"], 4, Place.STAGED) == ["--a", *more]


def test_given_flags_win_over_those_of_the_place() -> None:
    given = ["--cpu-collectives=gloo", "--engines-per-device=1"]
    assert server_flags(given, 2, Place.STAGED) == given


def test_flags_on_one_gpu_share_it_eagerly_and_leave_out_the_cpus() -> None:
    assert server_flags(["--cpu-collectives=gloo", "--a"], 2, Place.ONE_GPU) == [
        "--a",
        "--engines-per-device=2",
        "--gpu-memory-utilization=0.1",
        "--kv-cache-memory-bytes=67108864",
        "--cuda-collectives=staged",
        "--no-async-scheduling",
        "--enforce-eager",
    ]


def test_flags_on_one_gpu_keep_memory_graphs_and_scheduling_that_are_given() -> None:
    given = ["--kv-cache-memory-bytes=1", "--cuda-graphs", "--async-scheduling"]
    assert server_flags(given, 1, Place.ONE_GPU) == [
        *given,
        "--engines-per-device=1",
        "--gpu-memory-utilization=0.1",
    ]


def test_stock_on_one_gpu_leaves_room_for_ours() -> None:
    more = ["--gpu-memory-utilization=0.1", "--kv-cache-memory-bytes=67108864"]
    assert stock_flags(["--a"], Place.ONE_GPU) == ["--a", *more]


def test_stock_on_the_cpu_has_the_flags_given() -> None:
    assert stock_flags(["--a"], Place.STAGED) == ["--a"]


def test_variables_are_of_one_gpu_alone() -> None:
    assert environment(Place.STAGED, has_preamble=True) == {}
    assert environment(Place.ONE_GPU)["VLLM_USE_V2_MODEL_RUNNER"] == "0"


def test_engines_are_forked_where_they_need_the_preamble() -> None:
    name = "VLLM_WORKER_MULTIPROC_METHOD"
    assert name not in environment(Place.ONE_GPU)
    assert environment(Place.ONE_GPU, has_preamble=True)[name] == "fork"


def test_server_on_a_gpu_has_an_interpreter_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines: list[list[str]] = []
    monkeypatch.setenv(SETTING, Place.ONE_GPU)
    monkeypatch.setattr("harness.forked.command", lambda line, cwd: lines.append(line))
    forked(["serve", "model"], "x = 1")
    ((python, option, code, *arguments),) = lines
    assert (python, option, arguments) == (sys.executable, "-c", ["serve", "model"])
    assert "exec('x = 1', {})" in code
    compile(code, "line", "exec")
