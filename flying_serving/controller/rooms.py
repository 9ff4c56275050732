"""The room of groups: the tokens of KV that each holds for its requests.

A widest group may have *extra* room for a time, in which its engines serve no narrower group.
`WeightLending` gives and takes it, for requests that wait for it here.
"""

from typing import NamedTuple

from flying_serving.controller.loads import Loads
from flying_serving.controller.requests import RequestState
from flying_serving.controller.settings import Capacity
from flying_serving.layout.groups import Group, Layout


class ExtraRoom(NamedTuple):
    """The extra room of a widest group.

    `is_there`: its requests may have it. `is_closing`: only requests that need it have it, if
    it is there, until they end; then it goes. `excludes_narrower`: its engines can serve no
    narrower group.
    """

    is_there: bool = False
    is_closing: bool = False
    excludes_narrower: bool = False


NO_EXTRA = ExtraRoom()


class Rooms:
    """The room of each group now, and the groups that may begin requests.

    `extra`: the extra room of each widest group. `has_extra`: True if they ever have any.
    `awaited`: widest groups for whose extra room a request waits. A request after it gets no
    narrower group of their engines.
    `narrow_waits`: widest groups for whose engines a request of a lower degree waits.
    """

    def __init__(self, capacity: Capacity, engines: int, loads: Loads) -> None:
        self._usual = capacity.kv_tokens
        self._loads = loads
        self._widest = max(capacity.kv_tokens)
        self._most = capacity.most_tokens[self._widest]
        self.has_extra = self._most > self._usual[self._widest]
        self.extra = dict.fromkeys(Layout.uniform(engines, self._widest).groups, NO_EXTRA)
        self.awaited: set[Group] = set()
        self.narrow_waits: set[Group] = set()

    # ---- tokens

    def tokens(self, group: Group) -> int:
        """Return the tokens that a group has room for now."""
        extra = self.extra.get(group, NO_EXTRA)
        is_whole = extra.is_there and not extra.is_closing
        return self._most if is_whole else self._usual[len(group)]

    def shared(self, group: Group) -> float:
        """Return the tokens that the requests of a group may need together.

        Requests that need its extra room keep it until it goes. The others have the usual tokens.
        """
        extra = self.extra.get(group, NO_EXTRA)
        if not (extra.is_there and extra.is_closing):
            return self.tokens(group)
        return min(self._most, self.tokens(group) + self._in_extra(group))

    def of_size(self, size: int) -> float:
        """Return the tokens that a group of a size has for requests that need no extra room.

        It is the least of all widest groups.
        """
        usual = self._usual[size]
        return min(
            (
                self.tokens(group) - self._in_extra(group) if self.tokens(group) > usual else usual
                for group in self.extra
                if len(group) == size
            ),
            default=usual,
        )

    def of_request(self, request: RequestState, group: Group) -> int:
        """Return the tokens that a request may have in a group.

        They are more than the usual ones only if it needs them now. Otherwise it could be left
        without room for its next token when extra room closes.
        """
        return self.tokens(group) if self.needs_extra(request) else self._usual[len(group)]

    def _in_extra(self, group: Group) -> float:
        """Return the tokens of the requests of a group that need its extra room."""
        requests = self._loads[group].requests.values()
        return sum(one.committed_tokens for one in requests if self.needs_extra(one))

    # ---- extra room

    def needs_extra(self, request: RequestState) -> bool:
        """Return whether a request needs more than any group holds without extra room."""
        return self.has_extra and request.needed_tokens > self._usual[self._widest]

    def with_extra(self, tokens: float, layout: Layout) -> set[Group]:
        """Return the groups of `layout` that lack room for some tokens beside their requests, and
        would have it with their extra room.
        """
        return {
            group
            for group in self.extra.keys() & set(layout.groups)
            if self._usual[len(group)] < self._loads[group].committed_tokens + tokens <= self._most
        }

    def fits_usual(self, group: Group) -> bool:
        """Return whether the requests of a group need no extra room, alone or together."""
        work = self._loads[group]
        is_needed = any(map(self.needs_extra, work.requests.values()))
        return not is_needed and work.committed_tokens <= self._usual[len(group)]

    def is_closing(self, group: Group) -> bool:
        """Return whether the extra room of a group is closing, or goes."""
        return self.extra.get(group, NO_EXTRA).is_closing

    def pinned(self) -> set[Group]:
        """Return the groups with requests that no layout without them could go on with."""
        return {
            group
            for group, extra in self.extra.items()
            if extra.excludes_narrower
            and any(map(self.needs_extra, self._loads[group].requests.values()))
        }

    # ---- groups that may begin requests

    def is_ready(self, group: Group) -> bool:
        """Return whether the engines of a group can serve it now."""
        return len(group) == self._widest or not self.extra[self._outer(group)].excludes_narrower

    def is_open(self, group: Group) -> bool:
        """Return whether a group may begin requests: its engines can serve it, and need not become
        idle.
        """
        return self.is_ready(group) and (
            len(group) == self._widest or self._outer(group) not in self.awaited
        )

    def forget_waits(self) -> None:
        """Forget what requests wait for."""
        self.awaited, self.narrow_waits = set(), set()

    def note_wait(self, request: RequestState, layout: Layout) -> None:
        """Note a request that waits: for the extra room of a group of `layout`, or for engines of a
        lower degree.
        """
        if self.needs_extra(request):
            self.awaited |= self.extra.keys() & set(layout.groups)
        elif request.spec.degree is not None and request.sizes[0] != self._widest:
            self.narrow_waits |= self.extra.keys() - self.awaited

    def _outer(self, group: Group) -> Group:
        """Return the widest group with these engines."""
        first = group[0] - group[0] % self._widest
        return tuple(range(first, first + self._widest))
