"""Settings: what is accepted, what is refused and in which words, and that they survive the way to
other processes.
"""

import json
import pickle
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from flying_serving.config import (
    GROUPS,
    KEY,
    Deployment,
    FlyingConfig,
    PolicyName,
    deployment_of,
    parse_flying,
)
from flying_serving.errors import ConfigError, FlyingError
from flying_serving.policy.policies import POLICIES


def deployment(**changes: Any) -> Deployment:
    """Return a deployment of four engines."""
    fields: dict[str, Any] = {
        "run_dir": "/dev/shm/flying-x",
        "engines": 4,
        "devices": 1,
        "group_sizes": (1, 2, 4),
        "flying": FlyingConfig(),
    }
    return Deployment(**fields | changes)


def test_an_empty_object_is_the_default_configuration() -> None:
    config = parse_flying({})
    assert config == FlyingConfig()
    assert config.group_sizes is None
    assert config.policy == "auto"
    assert config.cpu_collectives == "shm"
    assert config.weave_steps == 1


@pytest.mark.parametrize(
    ("raw", "field", "allowed"),
    [
        ({"group_sizes": [2, 4]}, "group_sizes=[2, 4]", "1 must be among"),
        ({"group_sizes": []}, "group_sizes=[]", "1 must be among"),
        ({"group_sizes": [1, 3]}, "group_sizes=[1, 3]", "group size 3 is not one of 1, 2, 4, 8"),
        ({"group_sizes": [1, 0]}, "group_sizes=[1, 0]", "group size 0 is not one of"),
        ({"group_sizes": [1, -2]}, "group_sizes=[1, -2]", "group size -2 is not one of"),
        ({"group_sizes": [1, 16]}, "group_sizes=[1, 16]", "group size 16 is not one of"),
        ({"group_sizes": [1, "two"]}, "group_sizes[1]='two'", "must be a whole number"),
        ({"policy": "magic"}, "policy='magic'", "must be 'auto', 'load', 'priority'"),
        ({"cpu_collectives": "mpi"}, "cpu_collectives='mpi'", "must be 'shm', 'gloo' or 'staged'"),
        ({"group_sizes": "1,2"}, "group_sizes='1,2'", "must be a list"),
        ({"weave_steps": 0}, "weave_steps=0", "must be a whole number from 1 up to 1000"),
        ({"weave_steps": 1001}, "weave_steps=1001", "must be a whole number from 1 up to 1000"),
        ({"weave_steps": 1.5}, "weave_steps=1.5", "must be a whole number from 1 up to 1000"),
        ({"max_pause_ms": 0}, "max_pause_ms=0", "must be a number from 1 up to 3600000"),
        ({"max_pause_ms": "soon"}, "max_pause_ms='soon'", "must be a number from 1 up to 3600000"),
        (
            {"max_pause_ms": float("nan")},
            "max_pause_ms=nan",
            "must be a number from 1 up to 3600000",
        ),
        (
            {"max_pause_ms": float("inf")},
            "max_pause_ms=inf",
            "must be a number from 1 up to 3600000",
        ),
        (
            {"collective_timeout_s": -1},
            "collective_timeout_s=-1",
            "must be a number above 0 up to 86400",
        ),
        ({"lend_blocks": 0}, "lend_blocks=0", "must be a whole number from 1 up to 1000000"),
        (
            {"most_urgent_priority": 1},
            "most_urgent_priority=1",
            f"a whole number from {-(2**63)} up to 0",
        ),
        ({"group_size": [1]}, "group_size=[1]", "unknown; known are group_sizes, policy, "),
    ],
)
def test_a_wrong_setting_is_refused_by_field_value_and_what_is_allowed(
    raw: dict[str, Any], field: str, allowed: str
) -> None:
    """In one line, and as an error of ours that is a ValueError too."""
    with pytest.raises(ConfigError) as caught:
        parse_flying(raw)
    message = str(caught.value)
    assert message.startswith(field + ":")
    assert allowed in message
    assert "\n" not in message
    assert isinstance(caught.value, FlyingError)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("priority", [None, 0, -1, -(2**63)])
def test_the_most_urgent_priority_refuses_no_usual_request(priority: int | None) -> None:
    """Whatever may be set, a request that names no priority, and so has 0, is taken."""
    assert parse_flying({"most_urgent_priority": priority}).most_urgent_priority == priority


@given(st.lists(st.sampled_from([1, 2, 4, 8]), max_size=6))
def test_group_sizes_come_out_sorted_and_once(sizes: list[int]) -> None:
    assert parse_flying({"group_sizes": [*sizes, 1]}).group_sizes == tuple(sorted({1, *sizes}))


def test_the_policies_are_written_down_twice_alike() -> None:
    """Once for settings, once where they are made."""
    assert set(get_args(PolicyName)) == set(POLICIES)


def test_settings_are_frozen() -> None:
    """No process changes them for itself."""
    with pytest.raises(ValidationError, match="frozen"):
        FlyingConfig().weave_steps = 2  # type: ignore[misc]
    with pytest.raises(ValidationError, match="frozen"):
        deployment().engines = 2  # type: ignore[misc]


@pytest.mark.parametrize("engines", [0, 3, 6, 16])
def test_engines_are_a_power_of_two(engines: int) -> None:
    """As many as aligned groups can be made of, eight at most."""
    with pytest.raises(ValidationError):
        deployment(engines=engines)


def test_sizes_of_a_deployment() -> None:
    """The widest group, and the sizes that need a lane of their own."""
    assert deployment().widest == 4
    assert deployment().wider_sizes == (2, 4)
    assert deployment(engines=1, group_sizes=(1,)).wider_sizes == ()


@given(
    engines=st.sampled_from([1, 2, 4, 8]),
    devices=st.integers(1, 8),
    weave_steps=st.integers(1, 1000),
    max_pause_ms=st.floats(1, 3_600_000),
)
def test_a_deployment_survives_the_way_to_another_process(
    engines: int, devices: int, weave_steps: int, max_pause_ms: float
) -> None:
    """As plain data inside `additional_config`, pickled or as JSON."""
    flying = parse_flying(
        {"weave_steps": weave_steps, "max_pause_ms": max_pause_ms, "group_sizes": [1, 2]}
    )
    sent = deployment(engines=engines, devices=devices, flying=flying)
    carried = {"other": 1, KEY: sent.model_dump()}
    assert deployment_of(pickle.loads(pickle.dumps(carried))) == sent
    assert deployment_of(json.loads(json.dumps(carried))) == sent


def test_each_setting_is_in_one_group_in_the_order_of_help() -> None:
    of_groups = [field for group in GROUPS for field in group.fields]
    assert of_groups == list(FlyingConfig.model_fields)
