"""Signals end the demo wherever it is."""

import asyncio
import signal

import pytest
import uvloop

from flying_lab.signals import ended_by_signals

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.mark.parametrize("number", NUMBERS)
def test_a_signal_interrupts_and_handlers_come_back(number: signal.Signals) -> None:
    """Also where a shell has SIGINT ignored, as for what it runs in the background."""
    kept = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        before = [signal.getsignal(each) for each in NUMBERS]
        with pytest.raises(KeyboardInterrupt), ended_by_signals():
            signal.raise_signal(number)
        assert [signal.getsignal(each) for each in NUMBERS] == before
    finally:
        signal.signal(signal.SIGINT, kept)


@pytest.mark.parametrize("number", NUMBERS)
def test_a_loop_that_waits_for_sigint_gets_it(number: signal.Signals) -> None:
    """A replay ends by SIGINT; nothing is thrown into a callback of its loop."""

    async def replay() -> bool:
        loop, stopped = asyncio.get_running_loop(), asyncio.Event()
        loop.add_signal_handler(signal.SIGINT, stopped.set)
        loop.call_soon(signal.raise_signal, number)
        async with asyncio.timeout(10):
            return await stopped.wait()

    with ended_by_signals():
        assert uvloop.run(replay())
