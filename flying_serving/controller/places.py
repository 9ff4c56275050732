"""Places that are held for requests between the check that lets them in and their arrival."""

from collections import defaultdict
from dataclasses import dataclass


@dataclass(frozen=True)
class Origin:
    """Where a request comes from.

    `call`: the call of a client that it belongs to, by which a place was held; its `n` outputs are
    of one call. `event`: what it comes together with, as all prompts of one HTTP request. None:
    nobody held a place; it is alone.
    """

    call: str | None = None
    event: str | None = None


ALONE = Origin()


@dataclass(eq=False)
class Place:
    """Room in the queue for the requests of one call: `left` of them, each with a prompt of
    `prompt_tokens`.

    `ahead`: the call itself is yet to be made.
    """

    call: str
    prompt_tokens: int = 0
    left: int = 1
    urgent: bool = False
    ahead: bool = False


class Places:
    """The places that are held. What holds one gives it back, or its requests arrive."""

    def __init__(self) -> None:
        self.requests = {False: 0, True: 0}
        """How many requests have one, by whether they are urgent."""
        self._prompt_tokens = 0
        self._of_call: defaultdict[str, list[Place]] = defaultdict(list)

    def __bool__(self) -> bool:
        return bool(self._of_call)

    def tokens_beyond(self, requests: int) -> int:
        """Prompt tokens of those that are left when so many have begun, if all prompts are of the
        mean length.
        """
        count = sum(self.requests.values())
        return self._prompt_tokens * max(0, count - requests) // max(1, count)

    def hold(self, place: Place) -> None:
        """Hold a place until `give_back`."""
        self._of_call[place.call].append(place)
        self._count(place, place.left)

    def claim(self, call: str) -> bool:
        """A call is made. Whether a place was held ahead for it; there is none for another call of
        this name then.
        """
        held = next((place for place in self._of_call.get(call, ()) if place.ahead), None)
        if held is not None:
            held.ahead = False
        return held is not None

    def holds(self, call: str | None) -> bool:
        """Whether a request of this call has a place."""
        return call in self._of_call

    def take(self, call: str | None) -> bool:
        """A request of this call arrives. Whether a place was held for it, which it has had
        then.
        """
        if call is None or not self.holds(call):
            return False
        place = self._of_call[call][0]
        place.left -= 1
        self._count(place, -1)
        if not place.left:
            self._forget(place)
        return True

    def give_back(self, place: Place) -> None:
        """No more requests of this place arrive."""
        if place.left:
            self._forget(place)
            self._count(place, -place.left)
            place.left = 0

    def _forget(self, place: Place) -> None:
        self._of_call[place.call].remove(place)
        if not self._of_call[place.call]:
            del self._of_call[place.call]

    def _count(self, place: Place, change: int) -> None:
        self.requests[place.urgent] += change
        self._prompt_tokens += change * place.prompt_tokens
