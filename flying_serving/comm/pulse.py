"""Signs of life: every process of an engine raises a counter of its own, which the API server
watches.
"""

import threading
import time
from collections.abc import Iterable

from flying_serving.comm.life import hold, is_held
from flying_serving.comm.mapped import MappedArray
from flying_serving.comm.waits import LONGEST_LOOK_S, WaitTime

BEAT_S = 0.1
"""Seconds between two rises of a process's counter."""


class Pulse(MappedArray):
    """Counters of all processes of a server's engines, in one small file that they map. Each has
    one writer.

    An engine of one device is one process; an engine of several has one more process for each
    device. Beside the counters, each engine says whether it ends because it was told to, and the
    API server whether an engine is lost. It says so before it tells others, which then use the
    memory again that they had shared with the engine. A device's process holds a byte of the file
    locked.
    """

    def __init__(self, run_dir: str, engines: int, devices: int) -> None:
        self._processes = 1 if devices == 1 else 1 + devices
        self._left = engines * self._processes
        self._lost = self._left + engines
        super().__init__(f"{run_dir}/pulse", self._lost + engines, "Q")

    def beat(self, engine: int, device: int | None = None) -> None:
        """Raise a counter from now on, a device's or the engine's own, as long as this process
        runs.

        It stops when the engine has said that it ends, so that an engine which hangs then is
        silent.
        """
        counter = self._counter(engine, device)
        if device is not None:
            hold(self.file, counter)
        arguments = engine, counter
        threading.Thread(target=self._beat, args=arguments, name="pulse", daemon=True).start()

    def _beat(self, engine: int, counter: int) -> None:
        while not self.has_left(engine):
            time.sleep(BEAT_S)
            self.numbers[counter] += 1

    def living_devices(self, engine: int) -> list[int]:
        """Return the devices of an engine whose processes, its children, have not ended; the engine
        may have ended.
        """
        return [
            device
            for device in range(self._processes - 1)
            if is_held(self.file, self._counter(engine, device))
        ]

    def _counter(self, engine: int, device: int | None) -> int:
        """Return the index of a process's counter, which is also the byte that it holds locked."""
        return engine * self._processes + (0 if device is None else 1 + device)

    def enter(self, engine: int) -> None:
        """Say that an engine has begun."""
        self.numbers[self._left + engine] = 0

    def leave(self, engine: int) -> None:
        """Say that an engine ends because a signal has told it to."""
        self.numbers[self._left + engine] = 1

    def has_left(self, engine: int) -> bool:
        """Return whether an engine has said that it ends."""
        return bool(self.numbers[self._left + engine])

    def declare_lost(self, engine: int) -> None:
        """Say to all processes that an engine is lost."""
        self.numbers[self._lost + engine] = 1

    def declare_back(self, engine: int) -> None:
        """Say to all processes that a lost engine is there again."""
        self.numbers[self._lost + engine] = 0

    def is_lost(self, engine: int) -> bool:
        """Return whether the API server has said that an engine is lost."""
        return bool(self.numbers[self._lost + engine])

    def of(self, engine: int) -> Iterable[int]:
        """Return the counters of an engine's processes."""
        first = engine * self._processes
        return tuple(self.numbers[first : first + self._processes])


class Silence:
    """The seconds for which counters have not changed, by a clock that stops while its owner does
    not look.

    A watcher that is stopped itself, as the whole machine may be, must not take others for dead.
    """

    def __init__(self, longest_look_s: float = LONGEST_LOOK_S) -> None:
        self._time = WaitTime(longest_look_s)
        self._last: tuple[int, ...] = ()
        self._unchanged_s: list[float] = []
        self._not_begun: set[int] = set()

    def look(self, counters: Iterable[int], now_s: float, *, starts: bool = False) -> float:
        """Return the longest silence of any counter, in seconds.

        Of an engine that `starts` the first counter is its own; another one counts once it has
        risen, as its process begins later.
        """
        found = tuple(counters)
        passed_s = self._time.look(now_s)
        if len(found) != len(self._last):
            self._last, self._unchanged_s = found, [0.0] * len(found)
            self._not_begun = set(range(1, len(found)))
        same = {index for index, old in enumerate(self._last) if found[index] == old}
        self._not_begun &= same if starts else set()
        self._unchanged_s = [
            silent_s + passed_s if index in same - self._not_begun else 0.0
            for index, silent_s in enumerate(self._unchanged_s)
        ]
        self._last = found
        return max(self._unchanged_s, default=0.0)
