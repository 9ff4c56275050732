"""Queues under a fixed policy, which dispatches at once: a deadline counts in the queue of the
group's leader.
"""

from collections.abc import Iterator

import pytest

from harness.live import Server
from tests.deep.server.queues import FLAGS, check_begun, check_deadlines

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server("llama", 2, *FLAGS, "--policy=static-tp") as live:
        yield live


def test_requests_that_wait_in_an_engine_meet_their_deadline_or_get_504(server: Server) -> None:
    check_deadlines(server, 1)


def test_a_request_that_has_begun_may_take_longer_than_its_deadline(server: Server) -> None:
    check_begun(server)
