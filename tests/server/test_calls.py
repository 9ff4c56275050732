"""Calls of engine utilities that cannot be sent: nothing waits for their answers, and who only tells goes on."""

from __future__ import annotations

import asyncio

import pytest

from tests.server.test_client import UTILITY, Client


async def test_a_call_that_cannot_be_sent_leaves_nobody_waiting() -> None:
    client = Client()
    client.unsendable = {"flying_report"}
    with pytest.raises(ValueError, match="planted"):
        client.utility(0, "flying_report")
    assert client.utility_results == {}


@pytest.mark.parametrize("ending", [False, True])
async def test_what_engines_cannot_be_told_is_logged(ending: bool, caplog: pytest.LogCaptureFixture) -> None:
    """And not raised. When the server ends it is no news."""
    client = Client()
    client.ending = ending
    client.unsendable = {"flying_retain"}
    client.tell(0, "flying_retain", ["a"])
    client.tell(1, "flying_announce_migrations")
    assert client.messages == [(UTILITY, "flying_announce_migrations", 1)]
    assert ("planted" in caplog.text) is not ending
    await asyncio.sleep(0)
    client.sent()
    await asyncio.wait(client.tasks, timeout=5)
    assert not client.tasks
