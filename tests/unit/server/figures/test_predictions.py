"""What is measured after a switch is what was predicted: request-seconds of the same requests,
weighed alike.
"""

import pytest

from flying_serving.controller.requests import RequestSpec, RequestState
from flying_serving.controller.switches import Switch
from flying_serving.layout.groups import Layout
from flying_serving.policy.snapshot import Decision
from flying_serving.predict.work import Objective
from flying_serving.server.figures.predictions import Predictions

APART, TOGETHER = Layout.uniform(2, 1), Layout.uniform(2, 2)
HORIZON_S = 20.0


def predictions() -> Predictions:
    return Predictions(Objective(HORIZON_S))


def request(name: str, arrived_s: float, tokens: int = 0) -> RequestState:
    return RequestState(name, RequestSpec(10, 20), (1, 2), 1, arrived_s, output_tokens=tokens)


def switch(number: int, at_s: float, stay: float | None = 500.0) -> Switch:
    decision = Decision(
        TOGETHER,
        "weave",
        "load: x",
        gain=200.0,
        cost=30.0,
        stay=stay,
        request_seconds=None if stay is None else stay - 250.0,
    )
    return Switch(
        APART, TOGETHER, "weave", at_s, 0, decision=decision, number=number, ordered_s=at_s
    )


def totals(found: Predictions) -> tuple[int, float, float]:
    return found.checked, found.predicted, found.measured


def test_waiting_weighs_as_much_as_streaming() -> None:
    """Each second of a request counts once."""
    found = predictions()
    old, new = request("old", 90.0, tokens=3), request("new", 99.0)
    found.begun(switch(1, 100.0))
    found.sample([old, new], 102.0)
    new.output_tokens = 1
    found.sample([old, new], 105.0)
    found.sample([], 119.9)
    assert totals(found) == (0, 0.0, 0.0)
    found.sample([], 120.0)
    assert not found.watching
    assert totals(found) == (1, pytest.approx(250.0 + 30.0), pytest.approx(2 + 2 + 3 + 3))


def test_requests_count_to_their_end_if_they_arrive_within_the_horizon() -> None:
    """The prediction is of whole requests."""
    found = predictions()
    found.begun(switch(1, 100.0))
    found.sample([], 115.0)
    within, after = request("within", 119.0, 1), request("late", 120.5, 1)
    found.sample([within], 119.0)
    found.sample([within, after], 121.0)
    found.sample([within, after], 150.0)
    assert found.checked == 0
    found.sample([after], 150.1)
    # a request counts for the time since the tick before it was first seen
    assert totals(found) == (1, 280.0, pytest.approx(4.0 + 2.0 + 29.0))


def test_second_switch_within_the_horizon_leaves_no_prediction_to_check() -> None:
    """What follows is the work of both. After the horizon it changes nothing for the first."""
    found = predictions()
    found.begun(switch(1, 100.0))
    found.begun(switch(2, 110.0))
    found.sample([], 121.0)
    assert found.checked == 0
    found.begun(switch(3, 130.0))
    found.sample([], 130.0)
    assert found.checked == 1
    found.sample([], 150.0)
    assert found.checked == 2


def test_a_switch_that_was_not_for_load_has_no_prediction_of_staying() -> None:
    """A request could not have run otherwise, or an operator spec it; neither counts as a
    prediction.
    """
    found = predictions()
    found.begun(switch(1, 100.0, stay=None))
    ordered = Switch(APART, TOGETHER, "weave", 101.0, 0, number=2)
    found.begun(ordered)
    assert not found.watching
    assert found.count == found.gain == found.cost == 0
    found.begun(switch(3, 102.0))
    found.begun(Switch(TOGETHER, APART, "weave", 103.0, 0, number=4))
    assert found.count == 1
    assert found.gain == 200.0
    assert found.cost == 30.0
    assert not found.watching, "an operator's switch, too, comes between"


def test_a_switch_that_failed_is_not_checked() -> None:
    found = predictions()
    one = switch(1, 100.0)
    found.begun(one)
    one.problem = "engine 1 did not answer"
    found.sample([], 125.0)
    assert totals(found) == (0, 0.0, 0.0)
