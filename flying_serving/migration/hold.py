"""When an engine makes no step of its own, so that all engines copy KV at the same time."""

HOLD_S = 0.5
"""How long engines make no step for copies that the client has announced, or is about to announce.

What is announced meanwhile does not extend it: where layouts change so fast that what was announced has migrated on
before it arrived, nothing would run any more."""


class Hold:
    """What is announced to an engine. Copies are best made together: a step in between keeps all others waiting."""

    def __init__(self) -> None:
        self._arrivals = 0
        self._messages = 0
        self._announcement_until_s = 0.0
        self._until_s = 0.0

    def await_announcement(self, now_s: float) -> None:
        """After this order requests migrate, which the client announces when all engines have answered.

        A step that begins before that would be made for nothing.
        """
        self._announcement_until_s = now_s + HOLD_S

    def announce(self, arrivals: int, messages: int, now_s: float) -> None:
        """Expect `arrivals` requests with their KV, and `messages` MigrateKV messages to this engine."""
        self._announcement_until_s = 0.0
        self._expire(now_s)
        if not (self._arrivals or self._messages):
            self._until_s = now_s + HOLD_S
        self._arrivals += arrivals
        self._messages += messages

    def arrival(self) -> None:
        """One of these requests is here."""
        self._arrivals = max(0, self._arrivals - 1)

    def message(self) -> None:
        """One of these messages is served."""
        self._messages = max(0, self._messages - 1)

    def holds(self, now_s: float) -> bool:
        """Whether the engine should only serve messages for now."""
        self._expire(now_s)
        return now_s < self._announcement_until_s or self._messages > 0

    def awaits_arrivals(self, now_s: float) -> bool:
        """Whether more requests are about to arrive; the copies of all are ordered together."""
        return self.holds(now_s) and self._arrivals > 0

    def _expire(self, now_s: float) -> None:
        if now_s >= self._until_s:
            self._arrivals = self._messages = 0
