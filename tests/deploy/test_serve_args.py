"""What nodes of one machine share of a command line, and what each gets for itself."""

import pytest

from flying_serving.deploy.serve_args import DEVICES, environment_of, parse_serve_args
from flying_serving.errors import ConfigError


def test_the_words_reach_the_nodes_as_they_are() -> None:
    words = ["model", "-dp", "4", "--tensor_parallel_size=2", "--shutdown-timeout", "30", "--policy", "auto"]
    args = parse_serve_args(words)
    assert args.words == tuple(words)
    assert (args.engines, args.devices, args.shutdown_s, args.has_key) == (4, 2, 30.0, False)


def test_a_key_is_one_of_the_command_line_or_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
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
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES=0,1: 2 nodes with 2 devices each need 4"):
        environment_of(0, 2, args, {DEVICES: "0,1"})


def test_processors_are_shared_unless_the_user_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 32)
    args = parse_serve_args(["m", "-dp", "4"])
    assert environment_of(0, 2, args, {})["OMP_NUM_THREADS"] == "4"
    assert environment_of(0, 2, args, {"OMP_NUM_THREADS": "3"})["OMP_NUM_THREADS"] == "3"
