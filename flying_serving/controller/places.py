"""Places that are held for requests between the check that lets them in and their arrival."""

from collections import defaultdict
from dataclasses import dataclass


@dataclass(frozen=True)
class Origin:
    """The call and the event of a request.

    `call`: the client's call that it belongs to, by which a place was held; its `n` outputs are of
    one call. None: no place was held. `event`: names the requests that it comes together with, as
    all prompts of one HTTP request. None: it is alone.
    """

    call: str | None = None
    event: str | None = None


ALONE = Origin()


@dataclass(eq=False)
class Place:
    """Room in the queue for `left` requests of one call, each with a prompt of `prompt_tokens`.

    `ahead`: the call itself is yet to be made.
    """

    call: str
    prompt_tokens: int = 0
    left: int = 1
    urgent: bool = False
    ahead: bool = False


class Places:
    """The places that are held. The holder of a place gives it back, or its requests arrive."""

    def __init__(self) -> None:
        self.requests = {False: 0, True: 0}
        """Number of requests that have a place, by urgency."""
        self._prompt_tokens = 0
        self._of_call: defaultdict[str, list[Place]] = defaultdict(list)

    def __bool__(self) -> bool:
        return bool(self._of_call)

    def tokens_beyond(self, requests: int) -> int:
        """Return the prompt tokens in places beyond the first `requests`, if all prompts are of the
        mean length.
        """
        count = sum(self.requests.values())
        return self._prompt_tokens * max(0, count - requests) // max(1, count)

    def hold(self, place: Place) -> None:
        """Hold a place until `give_back`."""
        self._of_call[place.call].append(place)
        self._count(place, place.left)

    def claim(self, call: str) -> bool:
        """Note that a call is made. Return whether a place was held ahead for it.

        Another call of this name has no place then.
        """
        held = next((place for place in self._of_call.get(call, ()) if place.ahead), None)
        if held is not None:
            held.ahead = False
        return held is not None

    def holds(self, call: str | None) -> bool:
        """Return whether a request of this call has a place."""
        return call in self._of_call

    def take(self, call: str | None) -> bool:
        """Note that a request of this call arrives. Return whether a place was held for it, which
        is used up then.
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
        """Give a place back: no more requests of it arrive."""
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
