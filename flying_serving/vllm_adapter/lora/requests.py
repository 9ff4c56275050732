"""The requests with adapters (LoRA) of a lane's scheduler, and the adapter that a slot is kept
for.
"""

from collections.abc import Callable, Collection
from collections.abc import Set as AbstractSet


class AdapterRequests:
    """The requests of one scheduler by adapter, each with its time of arrival.

    With all slots in use vLLM's scheduler passes over a request of another adapter, and admits the
    next one that fits. While requests of the adapters in the slots keep coming, it would never be
    admitted. So once it is `aging_s` old, a slot is kept for its adapter: see `keep`.

    `slots`: adapters that may be in a step. `aging_s`: in seconds.
    """

    def __init__(self, slots: int, aging_s: float) -> None:
        self._slots = slots
        self.aging_s = aging_s
        self._by_adapter: dict[int, dict[str, float]] = {}
        self._kept: int | None = None
        self._granted_s = float("-inf")
        """When an adapter last got the slot that was kept for it."""

    def arrived(self, adapter: int, request_id: str, now_s: float) -> None:
        """Note a request that the scheduler gets, or has."""
        self._by_adapter.setdefault(adapter, {}).setdefault(request_id, now_s)

    def ended(self, adapter: int, request_id: str) -> None:
        """Forget a request that has ended or leaves."""
        requests = self._by_adapter.get(adapter, {})
        requests.pop(request_id, None)
        if not requests:
            self._by_adapter.pop(adapter, None)

    def of(self, adapter: int) -> list[str]:
        """Return the requests of an adapter, the oldest first."""
        return list(self._by_adapter.get(adapter, ()))

    def arrived_s(self, adapter: int, request_ids: Collection[str]) -> float:
        """Return when the first of some requests of an adapter arrived."""
        return min(self._by_adapter[adapter][request_id] for request_id in request_ids)

    def keep(
        self, running: AbstractSet[int], waits: Callable[[str], bool], now_s: float
    ) -> int | None:
        """Return the adapter that gets the next slot; None if no slot is kept.

        It is that of the oldest request without a slot. It has the slot for `aging_s` before one is
        kept for another adapter: each change of adapters lets the batch run empty.

        `running`: the adapters of running requests. `waits`: whether a request waits for a slot
        alone, as far as is known.
        """
        kept = self._kept
        if kept is not None and kept in running:
            self._granted_s = now_s
        if kept is None or kept in running or self._oldest_s(kept, waits) is None:
            lacks = len(running) >= self._slots and now_s - self._granted_s >= self.aging_s
            self._kept = self._overdue(running, waits, now_s) if lacks else None
        return self._kept

    def _overdue(
        self, running: AbstractSet[int], waits: Callable[[str], bool], now_s: float
    ) -> int | None:
        """Return the adapter without a slot whose oldest request has waited longest, if that is
        `aging_s` or more.
        """
        oldest = {
            adapter: oldest_s
            for adapter in self._by_adapter.keys() - running
            if (oldest_s := self._oldest_s(adapter, waits)) is not None
        }
        adapter = min(oldest, key=lambda waiting: (oldest[waiting], waiting), default=None)
        return None if adapter is None or now_s - oldest[adapter] < self.aging_s else adapter

    def _oldest_s(self, adapter: int, waits: Callable[[str], bool]) -> float | None:
        """Return when the first request of an adapter arrived that waits; None if none waits."""
        requests = self._by_adapter.get(adapter, {}).items()
        return next((at_s for request, at_s in requests if waits(request)), None)
