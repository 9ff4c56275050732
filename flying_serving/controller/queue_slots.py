"""Slots of the queue, kept for requests between the check that admits them and their arrival."""

from collections import defaultdict
from dataclasses import dataclass


@dataclass(eq=False)
class CallSlots:
    """Slots for `left` requests of one call, each with a prompt of `prompt_tokens`.

    `ahead`: the call itself is yet to be made.
    """

    call: str
    prompt_tokens: int = 0
    left: int = 1
    urgent: bool = False
    ahead: bool = False


class QueueSlots:
    """The slots that are reserved. Their holder releases them, or requests arrive and use them."""

    def __init__(self) -> None:
        self.requests = {False: 0, True: 0}
        """Number of requests that have a slot, by urgency."""
        self._prompt_tokens = 0
        self._of_call: defaultdict[str, list[CallSlots]] = defaultdict(list)

    def __bool__(self) -> bool:
        return bool(self._of_call)

    def tokens_beyond(self, requests: int) -> int:
        """Return the prompt tokens of slots beyond the first `requests`, if all prompts are of the
        mean length.
        """
        count = sum(self.requests.values())
        return self._prompt_tokens * max(0, count - requests) // max(1, count)

    def reserve(self, slots: CallSlots) -> None:
        """Reserve slots until `release`."""
        self._of_call[slots.call].append(slots)
        self._count(slots, slots.left)

    def claim(self, call: str) -> bool:
        """Note that a call is made. Return whether slots were reserved ahead for it.

        Another call of this name has none then.
        """
        ahead = next((slots for slots in self._of_call.get(call, ()) if slots.ahead), None)
        if ahead is not None:
            ahead.ahead = False
        return ahead is not None

    def has(self, call: str | None) -> bool:
        """Return whether a request of this call has a slot."""
        return call in self._of_call

    def use(self, call: str | None) -> bool:
        """Note that a request of this call arrives. Return whether it has a slot, which is used up
        then.
        """
        if call is None or not self.has(call):
            return False
        slots = self._of_call[call][0]
        slots.left -= 1
        self._count(slots, -1)
        if not slots.left:
            self._forget(slots)
        return True

    def release(self, slots: CallSlots) -> None:
        """Release the slots that are left: no more requests of their call arrive."""
        if slots.left:
            self._forget(slots)
            self._count(slots, -slots.left)
            slots.left = 0

    def _forget(self, slots: CallSlots) -> None:
        self._of_call[slots.call].remove(slots)
        if not self._of_call[slots.call]:
            del self._of_call[slots.call]

    def _count(self, slots: CallSlots, change: int) -> None:
        self.requests[slots.urgent] += change
        self._prompt_tokens += change * slots.prompt_tokens
