"""Queues under `manual`, where requests wait in engines: deadlines, and a burst of more than may
wait.
"""

from collections import Counter
from collections.abc import Iterator

import pytest

from harness.live import Server
from tests.deep.server.queues import FLAGS, SEQS, check_begun, check_deadlines, complete, starts

pytestmark = pytest.mark.server

MOST_WAITING = 20


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server("llama", 2, *FLAGS) as live:
        yield live


@pytest.mark.parametrize("layout", [[[0], [1]], [[0, 1]]], ids=["1+1", "2"])
def test_requests_that_wait_in_engines_meet_their_deadline_or_get_504(
    server: Server, layout: list[list[int]]
) -> None:
    server.layout(layout)
    check_deadlines(server, len(layout))


def test_a_request_that_has_begun_may_take_longer_than_its_deadline(server: Server) -> None:
    check_begun(server)


def test_a_stream_of_a_burst_is_refused_by_its_status_or_served(server: Server) -> None:
    """80 streams come at once where 4 run and 20 may wait."""
    server.layout([[0], [1]])
    answers = list(starts(server, 80))
    codes = Counter(code for code, _ in answers)
    assert set(codes) <= {200, 429}
    assert codes[200] >= MOST_WAITING + 2 * SEQS
    assert codes[429] > 0
    assert not [text for code, text in answers if code == 200 and '"error"' in text]
    assert all(
        "wait already (--max-waiting-requests)" in text for code, text in answers if code == 429
    )
    server.until_idle()


@pytest.mark.parametrize("n", [1, 2])
def test_more_prompts_than_ever_fit_are_refused_for_good(server: Server, n: int) -> None:
    """With as many as fit, none is."""
    server.layout([[0], [1]])
    most = (MOST_WAITING + 2 * SEQS) // n
    answer = complete(server, prompt=[[1, 2, 3]] * 300, n=n)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == "prompt"
    assert f"prompt: 300 prompts, must be at most {most}" in error["message"]
    answer = complete(server, prompt=[[1, 2, 3]] * most, n=n, temperature=1.0)
    assert len(answer.json()["choices"]) == most * n
    server.until_idle()
