"""The requests with adapters (LoRA) of a lane's scheduler."""

from collections.abc import Collection


class AdapterRequests:
    """The requests of one scheduler by adapter, each with its time of arrival."""

    def __init__(self) -> None:
        self._by_adapter: dict[int, dict[str, float]] = {}

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
        requests = self._by_adapter[adapter]
        return min(requests[request_id] for request_id in request_ids)
