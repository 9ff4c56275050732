"""The groups that lend their weights to their KV cache (Gyges): decided here, done by engines.

`weights/lending/engine_weights.py` does it. Only a widest group lends. It lends only while its
engines have nothing to do in narrower groups, whose weights are gone then. Its extra room (`Rooms`)
lasts until something needs narrower groups again.

    WHOLE --lend--> LENDING --lent--> LENT <--fetch--> CLOSING --fetch--> FETCHING --back--> WHOLE

If an engine could not lend, a group goes from LENDING to FETCHING.
"""

from collections.abc import Collection, Mapping

from flying_serving.controller.commands import FetchWeights, LendWeights
from flying_serving.controller.loads import Loads
from flying_serving.controller.rooms import ExtraRoom, Rooms
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
EXTRA: Mapping[LendingPhase, ExtraRoom] = {
    LendingPhase.WHOLE: ExtraRoom(),
    LendingPhase.LENDING: ExtraRoom(excludes_narrower=True),
    LendingPhase.LENT: ExtraRoom(is_there=True, excludes_narrower=True),
    LendingPhase.CLOSING: ExtraRoom(is_there=True, is_closing=True, excludes_narrower=True),
    LendingPhase.FETCHING: ExtraRoom(is_closing=True, excludes_narrower=True),
}
"""The extra room of a group in each phase of its weights."""


class WeightLending:
    """Takes the weights of each widest group from phase to phase, and so its extra room.

    `lends`: True if any group ever lends its weights.
    """

    def __init__(self, rooms: Rooms, loads: Loads) -> None:
        self._rooms = rooms
        self._loads = loads
        self.lends = rooms.has_extra
        self.phases = dict.fromkeys(rooms.extra, LendingPhase.WHOLE)
        self._entered_s: dict[Group, float] = {}
        self._took_s: dict[LendingPhase, float] = {}

    def lends_now(self, engine: int) -> bool:
        """Return whether an engine is without some of its weights."""
        return any(
            engine in group and phase is not LendingPhase.WHOLE
            for group, phase in self.phases.items()
        )

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

    def _enter(self, group: Group, phase: LendingPhase, now_s: float) -> float:
        """Enter the next phase of a group. Returns the seconds in the phase before.

        Raises RuntimeError if the phase may not follow the present one.
        """
        entered_s = self._entered_s.get(group, now_s)
        who = f"weights of group {list(group)}"
        self.phases[group] = self.phases[group].then(phase, TRANSITIONS, who)
        self._rooms.extra[group] = EXTRA[phase]
        self._entered_s[group] = now_s
        return now_s - entered_s

    def lend(self, layout: Layout, now_s: float) -> list[LendWeights]:
        """Let a group of `layout` lend, for which a request waits and whose engines are idle
        otherwise.

        One group begins at a time.
        """
        if not self._rooms.awaited or LendingPhase.LENDING in self.phases.values():
            return []
        awaited = (group for group in layout.groups if group in self._rooms.awaited)
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
        self._call_back({*leaving, *self._rooms.narrow_waits}, now_s)
        closing = [group for group, phase in self.phases.items() if phase is LendingPhase.CLOSING]
        groups = [group for group in closing if self._rooms.fits_usual(group)]
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
