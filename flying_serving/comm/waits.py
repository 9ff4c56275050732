"""Time that a process has waited, by a clock that stops while the process does."""

LONGEST_LOOK_S = 1.0


class WaitTime:
    """The seconds of a wait: the sum of the times between two looks, of which each counts as at
    most `longest_look_s`.

    The whole machine may be stopped, by its hypervisor or a freezer, and clocks go on. A process
    that measured a wait by its beginning would take all others for late when it goes on.
    """

    def __init__(self, longest_look_s: float = LONGEST_LOOK_S) -> None:
        self.waited_s = 0.0
        self._longest_look_s = longest_look_s
        self._looked_s: float | None = None

    def look(self, now_s: float) -> float:
        """Note a look at this time of a monotonic clock. Return the seconds that it adds; 0 at the
        first look, which begins the wait.
        """
        last_s = now_s if self._looked_s is None else self._looked_s
        passed_s = min(now_s - last_s, self._longest_look_s)
        self._looked_s = now_s
        self.waited_s += passed_s
        return passed_s
