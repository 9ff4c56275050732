"""What the live view is told of a server."""

import json
from dataclasses import replace

import pytest

from flying_serving.controller.controller import Controller
from flying_serving.controller.requests import RequestSpec
from flying_serving.controller.weight_lending import LendingPhase
from flying_serving.layout.groups import Layout
from flying_serving.observe.view.rolling import Rolling
from flying_serving.predict.migrations import MigrationCost
from flying_serving.server.engine_record import Loss
from flying_serving.server.figures.state import SHOWN_SPLITS, SHOWN_SWITCHES, to_ask
from flying_serving.wire import EngineMemory
from tests.unit.controller.model_settings import ANSWER, settings
from tests.unit.policy.costs import costs, measured
from tests.unit.server.figures.states import having, look, losses_of, switched

ASKED = RequestSpec(30, 50, 20, expected_tokens=20)


def splitting() -> Controller:
    """A server on which KV migrates, and which does as requests ask."""
    controller = Controller(settings("manual", capped=False))
    controller.state.steps.calibrate(measured(costs((1, 2, 4))))
    controller.state.migrates = {2: MigrationCost(1e-4, 1e-7)}
    return controller


def test_an_idle_server() -> None:
    """Every engine alone, nothing held, nothing measured."""
    found = look(Controller(settings("manual")), Rolling(4), 1.0)
    assert found["layout"] == [[0], [1], [2], [3]]
    assert [group["degree"] for group in found["groups"]] == [1, 1, 1, 1]
    assert [engine["kv_usage"] for engine in found["engines"]] == [0.0] * 4
    assert found["pool"] == {"requests": 0, "urgent": 0, "prompt_tokens": 0, "oldest_s": None}
    assert found["rolling"]["ttft_mean_ms"] is None
    assert found["others"] == []
    assert found["switches"] == []
    assert found["running"] == 0


@pytest.mark.parametrize(("mode", "stepping"), [("weave", "woven"), ("hard", "paused")])
def test_groups_of_an_older_layout_stand_aside(mode: str, stepping: str) -> None:
    """With their requests and lane state, until the requests have ended."""
    controller, rolling = switched(mode)
    found = look(controller, rolling, 9.0)
    (other,) = found["others"]
    assert other["engines"] == [0]
    assert other["requests"] == 1
    assert other["state"] == stepping
    assert other["held_tokens"] == 32
    assert other["prefill_tokens"] == 0
    assert found["groups"][0]["engines"] == [0, 1]
    assert found["groups"][0]["degree"] == 2
    controller.finished(["old"], 9.5)
    assert look(controller, rolling, 9.6)["others"] == []


def test_kv_usage_is_the_engines_own() -> None:
    """As it was last told, None before that; and nothing once no request is left that could hold
    any.
    """
    controller, rolling = switched()
    assert [engine["kv_usage"] for engine in look(controller, rolling, 9.0)["engines"]] == [
        0.25,
        None,
        None,
        None,
    ]
    controller.finished(["old", *(f"new{number}" for number in range(5))], 9.5, aborted=True)
    assert [engine["kv_usage"] for engine in look(controller, rolling, 9.6)["engines"]] == [0.0] * 4


@pytest.mark.parametrize("devices", [1, 2])
def test_an_engines_memory_is_that_of_all_its_devices(devices: int) -> None:
    """None before the engine has said; all of it is JSON."""
    chosen = settings("manual")
    controller = Controller(replace(chosen, capacity=replace(chosen.capacity, devices=devices)))
    found = look(controller, Rolling(4), 1.0, {2: having(EngineMemory(900, 500, 400))})["engines"]
    memory = {"weight_bytes": 900 * devices, "kv_bytes": 500 * devices, "lent_bytes": 400 * devices}
    assert [engine["memory"] for engine in json.loads(json.dumps(found))] == [
        None,
        None,
        memory,
        None,
    ]


def test_engines_are_asked_for_memory_that_may_change() -> None:
    """Once at first; then while they lend weights, until they have said that all are back."""
    controller, whole = Controller(settings("manual")), having(EngineMemory(900, 500))
    (group,) = controller.state.weight_lending.phases
    assert to_ask(controller, {}) == [0, 1, 2, 3]
    assert to_ask(controller, dict.fromkeys(group, whole)) == []
    for phase in LendingPhase:
        controller.state.weight_lending.phases[group] = phase
        asked = [] if phase is LendingPhase.WHOLE else [0, 1, 2, 3]
        assert to_ask(controller, dict.fromkeys(group, whole)) == asked
    controller.state.weight_lending.phases[group] = LendingPhase.WHOLE
    lent = having(EngineMemory(900, 500, 400))
    assert to_ask(controller, dict.fromkeys(group, whole) | {1: lent}) == [1]


def test_a_lost_engine_is_in_no_group_and_not_asked() -> None:
    """And what it has held is not shown as held."""
    controller, rolling = switched()
    losses = losses_of(4)
    losses.lost(0, Loss(5.0, "killed"), controller.state.layout, frozen=False)
    controller.engines_lost([0], 6.0)
    found = look(controller, rolling, 9.0, {}, losses)
    assert [group["engines"] for group in found["groups"]] == [[1], [2], [3]]
    assert found["others"] == [] and found["degraded"]
    assert found["engines"][0] == {"engine": 0, "kv_usage": 0.0, "memory": None}
    assert to_ask(controller, {}) == [1, 2, 3]
    assert json.loads(json.dumps(found)) == found


def test_the_task_pool() -> None:
    """How many wait, how long the first of them, and how much they bring."""
    controller, rolling = switched()
    found = look(controller, rolling, 9.0)
    waiting = len(controller.state.pool)
    assert found["pool"]["requests"] == waiting > 0
    assert found["pool"]["prompt_tokens"] == 10 * waiting
    assert found["pool"]["oldest_s"] == 9.0 - (3.0 + 5 - waiting)
    assert found["running"] == 6 - waiting
    controller.arrived("now", RequestSpec(10, 20, 10, priority=-1), 9.0)
    assert look(controller, rolling, 9.0)["pool"]["urgent"] == 1


@pytest.mark.parametrize(("at", "rest"), [(16, 34), (30, 20), (40, 10)])
def test_a_split_request_says_how_much_is_whose(at: int, rest: int) -> None:
    """Inside the prompt, at its end and in the output; when it is over, it is counted and not
    shown.
    """
    controller = splitting()
    controller.arrived("a", replace(ASKED, split_at=at), 1.0)
    found = look(controller, Rolling(4), 2.0)["splits"]
    assert found["shown"] == [{"first": [0], "second": [1], "at": at, "rest": rest}]
    assert found["now"] == 1
    assert found["begun"] == 1
    assert found["undone"] == 0
    controller.finished(["a"], 3.0)
    found = look(controller, Rolling(4), 3.0)["splits"]
    assert found == {"now": 0, "begun": 1, "undone": 0, "shown": []}


def test_of_split_requests_the_oldest_are_shown() -> None:
    controller = splitting()
    for number in range(SHOWN_SPLITS + 2):
        controller.arrived(f"a{number}", replace(ASKED, split_at=20 + number), 1.0)
    found = look(controller, Rolling(4), 2.0)["splits"]
    assert [each["at"] for each in found["shown"]] == [
        20 + number for number in range(SHOWN_SPLITS)
    ]
    assert found["now"] == SHOWN_SPLITS + 2


def test_switches_are_the_last_and_open_ones_say_so() -> None:
    """All of it is JSON."""
    controller, rolling = switched()
    found = look(controller, rolling, 9.0)
    assert [(each["mode"], each["open"]) for each in found["switches"]] == [("weave", True)]
    controller.finished(["old"], 9.5)
    for number in range(SHOWN_SWITCHES + 3):
        controller.begin_switch(
            Layout.uniform(4, 2 if number % 2 else 4), "weave", None, 10.0 + number
        )
        controller.acknowledged([ANSWER], 10.1 + number)
    found = look(controller, rolling, 99.0)
    assert len(found["switches"]) == SHOWN_SWITCHES
    assert found["switches"][-1]["number"] == found["switch_count"] == SHOWN_SWITCHES + 4
    assert json.loads(json.dumps(found)) == found
