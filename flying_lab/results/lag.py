"""The lag of the client itself: a client that cannot keep up measures itself, not the server."""

import asyncio
import time
from array import array

import msgspec
import numpy as np

TICK_S = 0.01
MOST_LAG_MS = 5.0
"""A client that is later than this at the 99th percentile has fallen behind."""


class Lag(msgspec.Struct, frozen=True, kw_only=True):
    """Percentiles of lateness in ms: of sending, and of the event loop, which reads the answers."""

    p99_send_lag_ms: float = 0.0
    max_send_lag_ms: float = 0.0
    p99_loop_lag_ms: float = 0.0
    max_loop_lag_ms: float = 0.0

    @property
    def p99_client_lag_ms(self) -> float:
        """The larger of the 99th percentiles of sending and of the event loop."""
        return max(self.p99_send_lag_ms, self.p99_loop_lag_ms)

    @property
    def behind(self) -> bool:
        """True if the client fell behind, so that its times cannot be trusted."""
        return self.p99_client_lag_ms > MOST_LAG_MS


class LagMeter:
    """Collects how late requests were sent, and how late a regular timer of the event loop
    fires.
    """

    def __init__(self) -> None:
        self._send_s = array("d")
        self._loop_s = array("d")
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = 0.0

    def sent(self, delay_s: float) -> None:
        """Note how late a request was sent."""
        self._send_s.append(delay_s)

    def start(self) -> None:
        """Begin to watch the running event loop."""
        self._due_s = time.perf_counter() + TICK_S
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def stop(self) -> None:
        """Stop watching the event loop."""
        if self._timer is not None:
            self._timer.cancel()

    def _tick(self) -> None:
        self._loop_s.append(max(0.0, time.perf_counter() - self._due_s))
        self.start()

    def result(self) -> Lag:
        """Return the percentiles until now; 0 where nothing was collected."""
        send, loop = (np.asarray(values or [0.0]) * 1e3 for values in (self._send_s, self._loop_s))
        return Lag(
            p99_send_lag_ms=float(np.percentile(send, 99)),
            max_send_lag_ms=float(send.max()),
            p99_loop_lag_ms=float(np.percentile(loop, 99)),
            max_loop_lag_ms=float(loop.max()),
        )
