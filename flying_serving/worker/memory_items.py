"""What a start takes of a device's memory beside KV: one line in the log for each item."""

from collections.abc import Callable


class MemoryItems:
    """The items of one device, measured one after the other. Where several processes share the
    device, those of the others that start meanwhile are in them.

    `free_bytes`: returns the memory of the device that no process has. `say`: logs a line.
    """

    def __init__(self, free_bytes: Callable[[], int], say: Callable[[str], None]) -> None:
        self._free_bytes = free_bytes
        self._say = say
        self._before_bytes = free_bytes()

    def taken(self, item: str) -> None:
        """Log what the device has lost since the item before."""
        now_bytes = self._free_bytes()
        self._say(f"memory of {item}: {(self._before_bytes - now_bytes) / 2**20:.0f} MiB")
        self._before_bytes = now_bytes
