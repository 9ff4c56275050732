"""Aging in vLLM's own scheduler under its priority policy: who is scheduled first, and who is
preempted.
"""

import pytest
from vllm.v1.request import Request, RequestStatus

from flying_serving.vllm_adapter.scheduler.priorities import FOREMOST
from tests.with_vllm.vllm_adapter.one_token import AGING_S, OneTokenLane

pytestmark = pytest.mark.usefixtures("classes_imported_here")


def until_begun(lane: OneTokenLane, name: str, *, every_s: float) -> float:
    """One urgent request after another comes, each when one has ended. Returns when `name` is
    scheduled.
    """
    now_s = 0.0
    lane.arrive(name, 0, now_s)
    for number in range(60):
        lane.arrive(f"urgent {number}", -5, now_s, outputs=1)
        now_s += every_s
        if name in lane.step():
            return now_s
    raise AssertionError("it has never begun")


def test_urgent_requests_pass_an_old_request_until_it_has_aged() -> None:
    """One step and one slot each second, and an urgent request that wants it."""
    assert AGING_S <= until_begun(OneTokenLane("priority"), "old", every_s=1.0) <= AGING_S + 2


def test_another_policy_is_left_alone() -> None:
    """First come, first served does not starve anyone."""
    lane = OneTokenLane("fcfs")
    old = lane.arrive("old", 3, 0.0)
    lane.arrive("new", 0, 2 * AGING_S)
    assert old.priority == 3
    assert noted(lane) == []


def test_an_aged_request_is_not_preempted_for_a_later_one() -> None:
    """Two that run share blocks for one of them only: the one that goes is the later one, however
    urgent.
    """
    lane = OneTokenLane("priority", blocks=1 + 8, max_num_seqs=2)
    lane.arrive("old", 0, 0.0, tokens=60)
    lane.step()
    lane.arrive("urgent", -5, AGING_S, tokens=60)
    assert lane.step() == {"old", "urgent"}
    for _ in range(12):
        scheduled = lane.step()
    assert scheduled == {"old"}


def noted(lane: OneTokenLane) -> list[str]:
    """Return of whom it is known when they arrived."""
    return [request_id for arrivals in lane.aging._arrivals.values() for _, request_id in arrivals]


def test_ended_requests_do_not_age() -> None:
    """Nothing is left of requests that arrived long ago."""
    lane = OneTokenLane("priority")
    for number in range(5):
        lane.arrive(f"r{number}", 0, float(number), outputs=1)
        lane.step()
    lane.arrive("last", 0, 100.0)
    assert noted(lane) == ["last"]


@pytest.mark.parametrize("aborted", [True, False])
def test_ended_request_is_forgotten_before_it_would_age(aborted: bool) -> None:
    """Whatever happens within that time: one entry for each that is there, and at most as many of
    others.
    """
    lane = OneTokenLane("priority")
    lane.arrive("old", 9, 0.0)
    for number in range(300):
        name = f"r{number}"
        lane.arrive(name, 0, AGING_S * number / 300, outputs=1)
        assert len(noted(lane)) <= 2 * len(lane.scheduler.requests)
        if aborted:
            lane.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        else:
            lane.step()
    assert noted(lane)[0] == "old"


def test_waiting_request_ages_after_others_were_forgotten() -> None:
    """With the time at which it arrived."""
    lane = OneTokenLane("priority")
    for number in range(20):
        lane.arrive(f"r{number}", 0, 0.1 * number)
    lane.scheduler.finish_requests(
        [f"r{number}" for number in range(20) if number != 5], RequestStatus.FINISHED_ABORTED
    )
    for number in range(20, 23):
        lane.arrive(f"r{number}", 0, 5.0)
    assert noted(lane) == ["r5", "r20", "r21", "r22"]
    kept = lane.scheduler.requests["r5"]
    lane.arrive("before", -5, 0.5 + AGING_S - 0.01)
    assert kept.priority == 0
    lane.arrive("after", -5, 0.5 + AGING_S)
    assert kept.priority == FOREMOST


def test_more_of_a_prompt_is_no_arrival() -> None:
    """A request ages from when it arrived, once."""
    lane = OneTokenLane("priority")
    lane.arrive("a", 0, 0.0)
    lane.aging.arrived(lane.scheduler, "a", 1.0)
    assert noted(lane) == ["a"]


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Requests that were compared with others."""
    found: list[str] = []
    less = Request.__lt__

    def counted(one: Request, other: Request) -> bool:
        found.append(one.request_id)
        return less(one, other)

    monkeypatch.setattr(Request, "__lt__", counted)
    return found


def one_arrival(compared: list[str], waiting: int, aged: int) -> int:
    """Return what it takes where so many wait, the later the more urgent, and so many have just
    aged.
    """
    lane = OneTokenLane("priority")
    for number in range(waiting):
        lane.arrive(f"{number:05}", -number, 0.0 if number < aged else 1.0)
    compared.clear()
    lane.aging.arrived(lane.scheduler, "next", AGING_S)
    assert sum(request.priority == FOREMOST for request in lane.scheduler.requests.values()) == aged
    return len(compared)


def test_arrival_in_a_long_queue_costs_logarithmic_comparisons(compared: list[str]) -> None:
    """Two comparisons more where four times as many wait, for each that has aged."""
    assert one_arrival(compared, 800, 1) <= one_arrival(compared, 200, 1) + 2 <= 12
    assert one_arrival(compared, 800, 800) <= 4 * (one_arrival(compared, 200, 200) + 2 * 200)
