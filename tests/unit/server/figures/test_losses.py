"""What is said of engines that are lost and come back."""

import json

from flying_serving.layout.groups import Layout
from flying_serving.server.engine_record import Loss
from flying_serving.server.figures.losses import KEPT
from tests.unit.server.figures.states import losses_of

TOGETHER = Layout.uniform(2, 2)
APART = Layout(((0,),))


def test_server_without_losses_is_not_degraded() -> None:
    assert losses_of(2).to_json() == {"degraded": False, "lost": [], "losses": {"0": 0, "1": 0}}


def test_a_lost_engine_is_named_with_since_when_and_why() -> None:
    """And why it could not be started again, until it is back; the number of losses stays."""
    losses = losses_of(2)
    losses.lost(1, Loss(100.0, "its process has ended"), TOGETHER, frozen=False)
    known = {
        "engine": 1,
        "since": 100.0,
        "why": "its process has ended",
        "losses": 1,
        "start_problem": None,
    }
    assert losses.to_json() == {"degraded": True, "lost": [known], "losses": {"0": 0, "1": 1}}
    losses.not_started(1, "it was not ready in time")
    known |= {"losses": 2, "start_problem": "it was not ready in time"}
    assert losses.to_json()["lost"] == [known]
    losses.back(1, APART)
    assert losses.to_json() == {"degraded": False, "lost": [], "losses": {"0": 0, "1": 2}}


def test_engines_are_listed_by_number() -> None:
    losses = losses_of(4)
    for engine in (2, 0):
        losses.lost(engine, Loss(1.0, "x"), Layout.uniform(4, 1), frozen=True)
    assert [one["engine"] for one in losses.to_json()["lost"]] == [0, 2]


def test_engine_lost_again_before_its_return_is_lost_since_the_first_loss() -> None:
    """The time until it is back counts from then, too; the layout did not change the second
    time.
    """
    losses = losses_of(2)
    losses.lost(1, Loss(100.0, "its process has ended", at_s=-1000.0), TOGETHER, frozen=False)
    losses.lost(1, Loss(130.0, "it froze"), APART, frozen=True)
    (known,) = losses.to_json()["lost"]
    assert known["since"] == 100.0
    assert known["why"] == "it froze"
    assert known["losses"] == 2
    losses.back(1, APART)
    assert losses.back_s.count == 1 and losses.back_s.sum > 1000.0
    assert [one["is_back"] for one in losses.view()["regroupings"]] == [False, True]


def test_the_view_is_told_which_layouts_have_ended() -> None:
    """Of a bounded number of them; all of it is JSON."""
    losses = losses_of(2)
    for _ in range(KEPT):
        losses.lost(1, Loss(1.0, "x"), TOGETHER, frozen=False)
        losses.back(1, APART)
    found = losses.view()
    assert [one["from"] for one in found["regroupings"]] == [[[0, 1]], [[0]]] * (KEPT // 2)
    assert json.loads(json.dumps(found)) == found
