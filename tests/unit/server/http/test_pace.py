"""A body comes fast enough, or is refused; time in which the server itself did not run is no fault
of a client.
"""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import pytest
from fastapi import HTTPException

from flying_serving.server.http import pace
from flying_serving.server.http.pace import GRACE_S, LEAST_BYTES_S, BodyPace, chunks


def seconds_until_refused(chunk_bytes: int, every_s: float, most_s: float = 10_000) -> float | None:
    """When a body that comes in equal chunks is refused; None if it may go on."""
    made, now_s = BodyPace(0.0), 0.0
    while now_s + every_s <= most_s:
        if now_s + every_s > made.deadline_s:
            return made.deadline_s
        now_s += every_s
        made.arrived(chunk_bytes, now_s)
    return None


@pytest.mark.parametrize("every_s", [0.1, 1.0, 9.0])
def test_a_body_with_the_least_rate_may_take_as_long_as_it_does(every_s: float) -> None:
    assert seconds_until_refused(round(LEAST_BYTES_S * every_s), every_s) is None


@pytest.mark.parametrize(("share", "refused_s"), [(0.0, GRACE_S), (0.5, 2 * GRACE_S)])
def test_a_slower_body_is_refused_when_its_time_is_used_up(share: float, refused_s: float) -> None:
    found = seconds_until_refused(round(LEAST_BYTES_S * share * 0.01), 0.01)
    assert found == pytest.approx(refused_s, abs=0.1)


def test_fast_bytes_earn_no_longer_grace() -> None:
    """A client that sends 16 MiB at once and stalls is not waited for for minutes."""
    made = BodyPace(0.0)
    made.arrived(2**24, 1.0)
    assert made.deadline_s == 1.0 + GRACE_S


def messages(parts: Sequence[bytes], wait_s: float) -> Any:
    """What receives a body in parts, each after some seconds."""
    left = list(parts)

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(wait_s)
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

    return receive


async def test_a_deadline_that_passes_while_the_server_stands_still_counts_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pace, "GRACE_S", 0.3)
    monkeypatch.setattr(pace, "STALL_S", 0.3)
    reading = asyncio.ensure_future(_read(messages([b"a", b"b"], 0.1)))
    await asyncio.sleep(0.05)
    time.sleep(1.0)
    assert await reading == b"ab"


async def test_silent_client_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "GRACE_S", 0.05)
    with pytest.raises(
        HTTPException, match=r"fallen 0\.05 s behind the least rate, 32768 bytes/s"
    ) as refused:
        await _read(messages([b"a"], 5.0))
    assert refused.value.status_code == 408


async def _read(receive: Any) -> bytes:
    return b"".join([chunk async for chunk in chunks(receive)])
