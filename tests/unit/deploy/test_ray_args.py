"""What an application of Ray Serve is told, and what follows for its nodes; Ray itself is not
needed.
"""

from typing import Any

import pytest

from flying_deploy.nodes import QUIET
from flying_deploy.ray_args import RayArgs, parse_args
from flying_serving.errors import ConfigError, NotInstalled


def test_texts_of_a_command_line_are_numbers() -> None:
    """`serve run ... nodes=2` gives texts, a config file numbers."""
    texts = {
        "model": "m",
        "nodes": "2",
        "engines": "4",
        "flags": "--dtype float32 --served-model-name 'a b'",
    }
    numbers = {
        "model": "m",
        "nodes": 2,
        "engines": 4,
        "flags": ["--dtype", "float32", "--served-model-name", "a b"],
    }
    assert parse_args(texts) == parse_args(numbers)
    assert parse_args(numbers).flags == ("--dtype", "float32", "--served-model-name", "a b")


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        ({}, "model: is needed"),
        ({"model": "m", "node": 2}, "node=2: unknown; known are model, nodes"),
        ({"model": "m", "nodes": "0"}, "nodes='0': must be a whole number from 1 up to 1000"),
        ({"model": "m", "engines": 3}, "engines=3: must be 1, 2, 4 or 8"),
        ({"model": "m", "engines": 16}, "engines=16: must be a whole number from 1 up to 8"),
        ({"model": "m", "device": "tpu"}, "device='tpu': must be 'cpu' or 'cuda'"),
        (
            {"model": "m", "flags": "--port 1"},
            "flags='--port 1': --port is not for flags: each node gets a free port",
        ),
        (
            {"model": "m", "flags": ["--data_parallel_size=4"]},
            "--data-parallel-size is not for flags: it is engines",
        ),
        (
            {"model": "m", "nodes": 2, "max_nodes": 3},
            "nodes, or min_nodes and max_nodes: one of them is expected",
        ),
        ({"model": "m", "min_nodes": 2}, "min_nodes is given without max_nodes"),
        (
            {"model": "m", "min_nodes": 3, "max_nodes": 2},
            "max_nodes=2: must be at least min_nodes=3",
        ),
    ],
)
def test_a_wrong_argument_is_one_line(raw: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_args(raw)
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_node_reserves_its_devices() -> None:
    """And on the CPU runs as many threads as it reserves CPUs."""
    cpu = RayArgs(model="m", engines=4, devices=2, cpus_per_device=3, device="cpu")
    assert cpu.bundle == {"CPU": 24.0}
    assert cpu.environment == {"OMP_NUM_THREADS": "3"}
    cuda = RayArgs(model="m", engines=4, devices=2, device="cuda")
    assert cuda.bundle == {"CPU": 8.0, "GPU": 8.0}
    assert cuda.environment == {}


def test_the_installed_vllm_says_what_a_device_is() -> None:
    assert RayArgs(model="m").device == "cpu"


def test_a_node_is_told_where_to_listen_and_how_to_end() -> None:
    args = RayArgs(model="m", engines=2, devices=4, drain_timeout_s=30, flags=("--dtype=float32",))
    line = (
        "m --host=127.0.0.1 --port=1 --shutdown-timeout=30 --data-parallel-size=2 "
        "--tensor-parallel-size=4"
    )
    assert args.command("127.0.0.1", 1) == [*line.split(), QUIET, "--dtype=float32"]


def test_without_ray_one_line_says_what_to_install() -> None:
    with pytest.raises(NotInstalled) as caught:
        import flying_deploy.ray  # noqa: F401
    assert str(caught.value) == 'Ray Serve is not installed: pip install "flying-serving[ray]"'
