"""The groups that lend their weights to their KV cache (Gyges): decided here, done by engines.

`weights/lending/engine_weights.py` does it. Only a widest group lends. It lends only while its
engines have nothing to do in narrower groups, whose weights are gone then. It holds
`Capacity.lent_tokens` instead of `Capacity.kv_tokens` until something needs narrower groups again.

    WHOLE --lend--> LENDING --lent--> LENT <--fetch--> CLOSING --fetch--> FETCHING --back--> WHOLE

If an engine could not lend, a group goes from LENDING to FETCHING.
"""

from collections.abc import Collection, Mapping

from flying_serving.controller.commands import FetchWeights, LendWeights
from flying_serving.controller.loads import Loads
from flying_serving.controller.requests import RequestState
from flying_serving.controller.settings import Capacity
from flying_serving.layout.groups import Group, Layout
from flying_serving.phase import Phase


class LendingPhase(Phase):
    """The phases of the weights of a widest group.

    WHOLE: in their place.
    LENDING: engines drop them.
    LENT: KV has their room.
    CLOSING: they are called back, once no request needs more than a whole group holds.
    FETCHING: engines have them back soon.
    """

    WHOLE = "whole"
    LENDING = "lending"
    LENT = "lent"
    CLOSING = "closing"
    FETCHING = "fetching"


TRANSITIONS: Mapping[LendingPhase, tuple[LendingPhase, ...]] = {
    LendingPhase.WHOLE: (LendingPhase.LENDING,),
    LendingPhase.LENDING: (LendingPhase.LENT, LendingPhase.FETCHING),
    LendingPhase.LENT: (LendingPhase.CLOSING,),
    LendingPhase.CLOSING: (LendingPhase.LENT, LendingPhase.FETCHING),
    LendingPhase.FETCHING: (LendingPhase.WHOLE,),
}
"""The phases that may follow a phase. Engines answer each order once, so no answer is a stray."""


class Rooms:
    """The tokens that groups have room for, and the groups whose engines have the weights for them:
    what other parts ask of the phase of each widest group.
    """

    def __init__(self, capacity: Capacity, engines: int, loads: Loads) -> None:
        self._capacity = capacity
        self._loads = loads
        self._widest = max(capacity.kv_tokens)
        self.phases = dict.fromkeys(
            Layout.uniform(engines, self._widest).groups, LendingPhase.WHOLE
        )
        self.awaited: set[Group] = set()
        """Widest groups for whose loan a request waits.

        A request after it gets no narrower group of their engines.
        """
        self.narrow_waits: set[Group] = set()
        """Widest groups whose engines a request for a lower degree waits for."""
        self._entered_s: dict[Group, float] = {}
        self._took_s: dict[LendingPhase, float] = {}

    @property
    def lends(self) -> bool:
        """True if any group ever lends its weights."""
        return self._capacity.lent_tokens > self._capacity.kv_tokens[self._widest]

    def opens_in_s(self, now_s: float) -> dict[Group, float]:
        """Return the seconds until narrower groups could have their weights, by widest group that
        lends them.

        The estimate is the time that it took last. Before the first time it is the time that it
        took to lend them. That is less than it takes to have them back, but not nothing.
        """
        lend_s = self._took_s.get(LendingPhase.LENDING, 0.0)
        fetch_s = self._took_s.get(LendingPhase.FETCHING, lend_s)
        opens_in_s = {}
        for group, phase in self.phases.items():
            gone_s = now_s - self._entered_s.get(group, now_s)
            if phase is LendingPhase.FETCHING:
                opens_in_s[group] = max(0.0, fetch_s - gone_s)
            elif phase is not LendingPhase.WHOLE:
                opens_in_s[group] = fetch_s + (
                    max(0.0, lend_s - gone_s) if phase is LendingPhase.LENDING else 0.0
                )
        return opens_in_s

    def of_size(self, size: int) -> float:
        """Return the tokens that a group of a size has for requests that need no loan.

        It is the least of all widest groups.
        """
        if size < self._widest:
            return self._capacity.kv_tokens[size]
        return min(
            self.tokens(group) - self._on_loan(group)
            if phase is LendingPhase.LENT
            else self._capacity.kv_tokens[size]
            for group, phase in self.phases.items()
        )

    def _on_loan(self, group: Group) -> float:
        """Return the tokens of requests that need the room of its weights."""
        return sum(
            request.committed_tokens
            for request in self._loads[group].requests.values()
            if self.needs_loan(request)
        )

    def tokens(self, group: Group) -> int:
        """Return the tokens that a group has room for now."""
        is_lent = self.phases.get(group) is LendingPhase.LENT
        return self._capacity.lent_tokens if is_lent else self._capacity.kv_tokens[len(group)]

    def shared(self, group: Group) -> float:
        """Return the tokens that the requests of a group may need together.

        Until weights that are called back can go, requests that need the room have it. The others
        have the tokens of a whole group.
        """
        if self.phases.get(group) is not LendingPhase.CLOSING:
            return self.tokens(group)
        return min(self._capacity.lent_tokens, self.tokens(group) + self._on_loan(group))

    def of_request(self, request: RequestState, group: Group) -> int:
        """Return the tokens that a request may have in a group.

        They are more than a whole group holds only if it needs them now. Otherwise weights that
        come back could leave it without room for its next token.
        """
        return (
            self.tokens(group) if self.needs_loan(request) else self._capacity.kv_tokens[len(group)]
        )

    def outer(self, group: Group) -> Group:
        """Return the widest group with these engines."""
        first = group[0] - group[0] % self._widest
        return tuple(range(first, first + self._widest))

    def lends_now(self, engine: int) -> bool:
        """Return whether an engine is without some of its weights."""
        return any(
            engine in group and phase is not LendingPhase.WHOLE
            for group, phase in self.phases.items()
        )

    def is_called_back(self, group: Group) -> bool:
        """Return whether the weights of a group come back, or will."""
        return self.phases.get(group) in (LendingPhase.CLOSING, LendingPhase.FETCHING)

    def has_weights(self, group: Group) -> bool:
        """Return whether its engines have the weights that a group needs."""
        return len(group) == self._widest or self.phases[self.outer(group)] is LendingPhase.WHOLE

    def is_open(self, group: Group) -> bool:
        """Return whether it may begin requests: its engines have the weights, and need not become
        idle.
        """
        return self.has_weights(group) and (
            len(group) == self._widest or self.outer(group) not in self.awaited
        )

    def needs_loan(self, request: RequestState) -> bool:
        """Return whether a request needs more than any group holds that lends nothing."""
        return self.lends and request.needed_tokens > self._capacity.kv_tokens[self._widest]

    def with_loan(self, tokens: float, layout: Layout) -> set[Group]:
        """Return the groups of `layout` that lack room for some tokens beside their requests, and
        would have it with the room of their weights.
        """
        whole, lent = self._capacity.kv_tokens[self._widest], self._capacity.lent_tokens
        return {
            group
            for group in self.phases.keys() & set(layout.groups)
            if whole < self._loads[group].committed_tokens + tokens <= lent
        }

    def pinned(self) -> set[Group]:
        """Return the groups with requests that no layout without them could go on with."""
        return {
            group
            for group, phase in self.phases.items()
            if phase is not LendingPhase.WHOLE
            and any(map(self.needs_loan, self._loads[group].requests.values()))
        }


class WeightLending(Rooms):
    """Takes the weights of each widest group from phase to phase."""

    def _enter(self, group: Group, phase: LendingPhase, now_s: float) -> float:
        """Enter the next phase of a group. Returns the seconds in the phase before.

        Raises RuntimeError if the phase may not follow the present one.
        """
        entered_s = self._entered_s.get(group, now_s)
        who = f"weights of group {list(group)}"
        self.phases[group] = self.phases[group].then(phase, TRANSITIONS, who)
        self._entered_s[group] = now_s
        return now_s - entered_s

    def lend(self, layout: Layout, now_s: float) -> list[LendWeights]:
        """Let a group of `layout` lend, for which a request waits and whose engines are idle
        otherwise.

        One group begins at a time.
        """
        if not self.awaited or LendingPhase.LENDING in self.phases.values():
            return []
        awaited = (group for group in layout.groups if group in self.awaited)
        group = next((group for group in awaited if self._may_lend(group)), None)
        if group is None:
            return []
        self._enter(group, LendingPhase.LENDING, now_s)
        return [LendWeights(group)]

    def lent(self, group: Group, now_s: float, *, complete: bool) -> None:
        """Note that the weights of a group have gone. If not all engines could drop theirs, they
        all come back.
        """
        if complete:
            self._took_s[LendingPhase.LENDING] = self._enter(group, LendingPhase.LENT, now_s)
        else:
            self._enter(group, LendingPhase.FETCHING, now_s)

    def fetch(self, leaving: Collection[Group], now_s: float) -> list[FetchWeights]:
        """Let weights come back to engines of which narrower groups are needed.

        `leaving`: the widest groups that the switch under way ends.
        """
        if not self.lends:
            return []
        self._call_back({*leaving, *self.narrow_waits}, now_s)
        groups = self._to_fetch()
        for group in groups:
            self._enter(group, LendingPhase.FETCHING, now_s)
        return [FetchWeights(group) for group in groups]

    def back(self, group: Group, now_s: float) -> None:
        """Note that the engines of a group have their weights back."""
        self._took_s[LendingPhase.FETCHING] = self._enter(group, LendingPhase.WHOLE, now_s)

    def _may_lend(self, group: Group) -> bool:
        """Return whether a group could begin to lend: it is a widest one, and its engines are
        otherwise idle.
        """
        others = {other for engine in group for other in self._loads.of_engine(engine)} - {group}
        return self.phases.get(group) is LendingPhase.WHOLE and not others

    def _call_back(self, groups: Collection[Group], now_s: float) -> None:
        """Call back the weights of these widest groups, and of no others."""
        for group, phase in self.phases.items():
            if phase is LendingPhase.LENT and group in groups:
                self._enter(group, LendingPhase.CLOSING, now_s)
            elif phase is LendingPhase.CLOSING and group not in groups:
                self._enter(group, LendingPhase.LENT, now_s)

    def _to_fetch(self) -> list[Group]:
        """Return the groups whose weights are called back and that have no request which needs
        their room.
        """
        room = self._capacity.kv_tokens[self._widest]
        closing = [group for group, phase in self.phases.items() if phase is LendingPhase.CLOSING]
        pinned = self.pinned()
        return [
            group
            for group in closing
            if self._loads[group].committed_tokens <= room and group not in pinned
        ]
