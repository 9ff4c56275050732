"""What nodes of one machine share of a command line, and what each gets for itself."""

import re

import pytest

from flying_deploy import serve_args
from flying_deploy.serve_args import DEVICES, environment_of, parse_serve_args
from flying_serving.errors import ConfigError
from tests.unit.placement.machines import machine


def test_the_words_reach_the_nodes_as_they_are() -> None:
    words = [
        "model",
        "-dp",
        "4",
        "--tensor_parallel_size=2",
        "--shutdown-timeout",
        "30",
        "--policy",
        "auto",
    ]
    args = parse_serve_args(words)
    assert args.words == tuple(words)
    assert args.engines == 4
    assert args.devices == 2
    assert args.shutdown_s == 30.0
    assert not args.has_key


def test_a_key_is_one_of_the_command_line_or_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert parse_serve_args(["model", "--api-key", "one", "two"]).has_key
    monkeypatch.setenv("VLLM_API_KEY", "one")
    assert parse_serve_args(["model"]).has_key


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "the model is expected"),
        (["--dtype=float32"], "the model is expected"),
        (["m", "--port", "80"], "--port='80' after --: each node gets a free port"),
        (["m", "--host=a"], "--host='a' after --: nodes of this machine listen on 127.0.0.1"),
        (["m", "--ssl_keyfile=a"], "--ssl-keyfile='a' after --: routers speak plain HTTP"),
        (["m", "-dp", "two"], "after --: .*invalid int value: 'two'"),
    ],
)
def test_unusable_command_lines_say_what_is_expected(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_serve_args(words)


@pytest.mark.parametrize(
    ("visible", "expected"),
    [(None, ["0,1,2,3", "4,5,6,7"]), ("8,9,a,b,c,d,e,f", ["8,9,a,b", "c,d,e,f"]), ("", ["", ""])],
)
def test_no_two_nodes_have_a_device_in_common(visible: str | None, expected: list[str]) -> None:
    """None of them is visible to vLLM for CPUs, if the variable is empty."""
    base = {} if visible is None else {DEVICES: visible}
    args = parse_serve_args(["m", "-dp", "2", "-tp", "2"])
    assert [environment_of(node, 2, args, base)[DEVICES] for node in range(2)] == expected


def test_too_few_devices_are_named() -> None:
    args = parse_serve_args(["m", "-dp", "2"])
    with pytest.raises(
        ConfigError, match="CUDA_VISIBLE_DEVICES=0,1: 2 nodes with 2 devices each need 4"
    ):
        environment_of(0, 2, args, {DEVICES: "0,1"})


BIND, THREADS = "VLLM_CPU_OMP_THREADS_BIND", "OMP_NUM_THREADS"


@pytest.mark.parametrize(
    ("base", "expected"),
    [
        ({}, [("0-3|4-7", "4"), ("8-11|12-15", "4")]),
        ({THREADS: "3"}, [("0-3|4-7", "3"), ("8-11|12-15", "3")]),
        ({BIND: "nobind"}, [("nobind", "4"), ("nobind", "4")]),
        ({BIND: "0-1|2|4-6|8"}, [("0-1|2", None), ("4-6|8", None)]),
    ],
    ids=["automatic", "threads", "unbound", "listed"],
)
def test_no_two_nodes_have_a_core_in_common(
    monkeypatch: pytest.MonkeyPatch, base: dict[str, str], expected: list[tuple[str, str | None]]
) -> None:
    monkeypatch.setattr(serve_args, "read_topology", lambda: machine(8, 8))
    args = parse_serve_args(["m", "-dp", "2"])
    made = [environment_of(node, 2, args, base) for node in range(2)]
    assert [(one[BIND], one.get(THREADS)) for one in made] == expected


def test_too_few_lists_of_cores_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_args, "read_topology", lambda: machine(8, 8))
    with pytest.raises(
        ConfigError, match=re.escape("'0|1': 2 lists; must be 'auto', 'nobind' or 4 lists")
    ):
        environment_of(0, 2, parse_serve_args(["m", "-dp", "2"]), {BIND: "0|1"})
