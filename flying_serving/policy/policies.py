"""The policies: pure functions of a snapshot. `auto` composes load, priority and context; others
are fixed.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from flying_serving.layout.groups import Layout
from flying_serving.policy import switching, transformations
from flying_serving.policy.ranking import Ranking
from flying_serving.policy.snapshot import Decision, Need, Snapshot
from flying_serving.predict.work import Objective, weight

FORECAST_ERROR = 0.05
"""A switch for load must gain this share of the cost of staying: less may be an error of the
forecasts.

The forecasts of two layouts for the same arrivals are off by 5 % beside each other (the root of the
mean square: docs/design/policies.md). That the arrivals may be others is not part of it:
`_unsure_at`.
"""


class ForUrgent(Enum):
    """When a policy forms a wide group for urgent requests, which takes engines from the others.

    `IF_THEY_WAIT`: if no group has room for one, and its wait costs more than the switch.
    """

    NEVER = "never"
    IF_THEY_WAIT = "if they wait"
    ALWAYS = "always"


@dataclass(frozen=True)
class Policy:
    """The reasons for which a server switches; `name`: the value of `--policy`.

    `for_urgent`: when it forms a wide group for an urgent request.
    `joins_for_long`: True if engines join for long requests, keep room for the next one, and part
    when there is none (Gyges: `policy.transformations`).
    `has_price`: False if engines join for one more long request at any cost.
    `splits`: True if requests are split over two groups where `policy.split` predicts a gain.
    `pinned_size`: group size of a fixed layout, as a function of the available sizes; None if the
    layout may change.
    `is_operated`: True if an operator orders the layout.
    """

    name: str
    by_load: bool = False
    for_urgent: ForUrgent = ForUrgent.NEVER
    by_context: bool = False
    joins_for_long: bool = False
    has_price: bool = True
    splits: bool = False
    pinned_size: Callable[[Sequence[int]], int] | None = None
    is_operated: bool = False

    @property
    def decides(self) -> bool:
        """True if the policy ever changes the layout by itself."""
        return self.by_load or self.by_context or self.by_priority

    @property
    def by_priority(self) -> bool:
        """True if the policy ever changes the layout for an urgent request."""
        return self.for_urgent is not ForUrgent.NEVER

    def decide(self, snapshot: Snapshot, objective: Objective) -> Decision | None:
        """Return the best change, made or not: see `Decision.is_made`. None if there is nothing to
        compare.
        """
        long = [need for need in snapshot.needs if self.by_context and not need.urgent]
        urgent = [need for need in snapshot.needs if self._has_to_serve(need)]
        if self.joins_for_long:
            return self._decide_for_long(snapshot, urgent, objective)
        needs = [*long, *urgent]
        if needs and not satisfies(snapshot.layout, needs):
            found = _decide_for_needs(snapshot, needs, objective)
            has_price = self.for_urgent is ForUrgent.IF_THEY_WAIT
            if has_price and satisfies(snapshot.layout, long):
                found, needs = _at_a_price(found, snapshot, urgent), long
            if found.is_made or not self.by_load:
                return found
        if self.by_load:
            return _decide_for_load(snapshot, needs, objective)
        if self.decides and not needs:
            return _decide_without_needs(snapshot, objective)
        return None

    def _has_to_serve(self, need: Need) -> bool:
        """Return whether a need is that of urgent requests for which the policy forms a group."""
        if self.for_urgent is ForUrgent.IF_THEY_WAIT:
            return need.urgent and need.waiting > 0
        return need.urgent and self.for_urgent is ForUrgent.ALWAYS

    def _decide_for_long(
        self, snapshot: Snapshot, urgent: Sequence[Need], objective: Objective
    ) -> Decision | None:
        """Return Gyges' switch. If none is made, engines may join for urgent requests, at a
        price.
        """
        found = transformations.decide(snapshot, objective, has_price=self.has_price)
        if (found is not None and found.is_made) or satisfies(snapshot.layout, urgent):
            return found
        joined = replace(snapshot, layouts=transformations.joined(snapshot))
        if not any(satisfies(layout, urgent) for layout in joined.layouts):
            return found
        return _at_a_price(_decide_for_needs(joined, urgent, objective), snapshot, urgent)

    def migrates_left_behind(self, snapshot: Snapshot, objective: Objective) -> bool:
        """Return whether requests in groups of an older layout should migrate to the present one
        instead of being woven in.

        A switch may leave a request behind because its group has begun its prompt. Once the prompt
        is done, the request migrates cheaply. None migrates while a request is urgent.
        """
        if not self.decides or (self.by_priority and any(need.urgent for need in snapshot.needs)):
            return False
        return switching.at_once(snapshot, snapshot.layout, objective) == "migrate"


POLICIES = {
    policy.name: policy
    for policy in (
        Policy("auto", by_load=True, for_urgent=ForUrgent.IF_THEY_WAIT, by_context=True),
        Policy("load", by_load=True),
        Policy("priority", for_urgent=ForUrgent.ALWAYS),
        Policy("context", by_context=True),
        Policy("gyges", for_urgent=ForUrgent.IF_THEY_WAIT, by_context=True, joins_for_long=True),
        Policy("static-dp", pinned_size=min),
        Policy("static-tp", pinned_size=max),
        Policy("split", splits=True, pinned_size=min),
        Policy("manual", is_operated=True),
    )
}


def satisfies(layout: Layout, needs: Sequence[Need]) -> bool:
    """Return whether the layout has a group for each need; one group may satisfy several."""
    return all(need.least_size <= layout.widest for need in needs)


def _shapes(snapshot: Snapshot, needs: Sequence[Need]) -> list[Layout]:
    """Return, for each shape, the layout that satisfies the needs and ends the groups with the
    fewest requests.
    """
    best: dict[tuple[int, ...], tuple[int, Layout]] = {}
    for layout in snapshot.layouts:
        if satisfies(layout, needs):
            old = sum(load.requests for load in switching.leaving(snapshot, layout).values())
            if layout.shape not in best or old < best[layout.shape][0]:
                best[layout.shape] = (old, layout)
    return [layout for _, layout in best.values()]


def _decide_for_needs(snapshot: Snapshot, needs: Sequence[Need], objective: Objective) -> Decision:
    """Switch to the best layout that satisfies the needs, at any cost, since a request cannot run
    otherwise.

    The mode of a switch for an urgent request is chosen for that request: as if no others arrived.
    """
    urgent = any(need.urgent for need in needs)
    needy = (
        replace(snapshot, work=replace(snapshot.work, rate=0.0, waiting=1.0, begun=0.0))
        if urgent
        else snapshot
    )
    shapes = _shapes(snapshot, needs)
    ranking = Ranking.of([*shapes, snapshot.layout], snapshot, objective)
    figures = ranking.figures()
    predicted = {layout: figures[layout] for layout in shapes}
    best: tuple[float, Layout, dict[str, float]] | None = None
    for layout in sorted(predicted, key=predicted.__getitem__):
        if best is not None and predicted[layout] >= best[0]:
            break
        considered = switching.costs(
            needy, layout, objective, ranking.measure, urgent=urgent, figure=predicted[layout]
        )
        total = predicted[layout] + min(considered.values())
        if best is None or total < best[0]:
            best = (total, layout, considered)
    assert best is not None
    _, layout, considered = best
    reason = "; ".join(sorted({need.reason for need in needs}))
    found = replace(
        switching.decision(snapshot, layout, reason, math.inf, considered), predicted=predicted
    )
    if urgent:
        return found
    return replace(found, promise=abs(figures[layout] - figures[snapshot.layout]))


def _at_a_price(found: Decision, snapshot: Snapshot, urgent: Sequence[Need]) -> Decision:
    """Return a switch for urgent requests that is made if they would lose more as they wait.

    Its cost counts twice, as it will be reversed.
    """
    waiting = sum(need.waiting for need in urgent)
    gain = weight(urgent=True) * waiting * switching.next_end_s(snapshot)
    return replace(found, gain=gain, least_gain=2 * found.cost)


def _decide_for_load(snapshot: Snapshot, needs: Sequence[Need], objective: Objective) -> Decision:
    """Return the layout that is predicted to be best; the switch to it is made if it gains
    enough.
    """
    work, present = snapshot.work, snapshot.layout
    layouts = [one for one in _shapes(snapshot, needs) if one.shape != present.shape]
    ranking = _ranking(layouts, snapshot, objective)
    predicted = _less_shortfalls(ranking.figures(), snapshot)
    stay = predicted.pop(present)
    layout = min(predicted, key=predicted.__getitem__, default=present)
    predicted[present] = stay

    gain = stay - predicted[layout]
    sooner = ranking.sooner(layout, present)
    reason = f"load: {work.rate:.2f} requests/s, {work.waiting:.0f} waiting"
    found = Decision(layout, "", reason, gain, cost=0.0)
    needed = least_gain(stay, 0.0, snapshot, sooner)
    if gain > needed:
        figure = ranking.figures()[layout]
        considered = switching.costs(
            snapshot, layout, objective, ranking.measure, urgent=False, figure=figure
        )
        found = switching.decision(snapshot, layout, reason, gain, considered)
        needed = least_gain(stay, found.cost, snapshot, sooner)
    unsure_at = _unsure_at(layout, found.cost, snapshot, objective) if gain > needed else None
    return replace(
        found,
        stay=stay,
        least_gain=needed,
        promised=snapshot.promised,
        unsure_at=unsure_at,
        predicted=predicted,
        request_seconds=ranking.forecasts[layout].request_seconds,
    )


def _less_shortfalls(figures: Mapping[Layout, float], snapshot: Snapshot) -> dict[Layout, float]:
    """Return the figures, in which layouts cost more if switches to such have gained less than
    predicted.
    """
    stay = figures[snapshot.layout]
    return {
        layout: figure + snapshot.shortfalls.get(layout.widest, 0.0) * stay
        if layout != snapshot.layout
        else figure
        for layout, figure in figures.items()
    }


def _unsure_at(
    layout: Layout, cost: float, snapshot: Snapshot, objective: Objective
) -> float | None:
    """Return a rate of arrivals, one standard deviation from the predicted one, at which a switch
    would not gain enough. None if there is none.

    The rate of a burst that has just begun is uncertain, and that of chance clusters.
    """
    present = snapshot.layout
    for work in snapshot.work.unlike:
        ranking = Ranking.of([present, layout], replace(snapshot, work=work), objective)
        figures = _less_shortfalls(ranking.figures(), snapshot)
        sooner = ranking.sooner(layout, present)
        gain = figures[present] - figures[layout]
        if gain <= least_gain(figures[present], cost, snapshot, sooner):
            return work.rate
    return None


def _ranking(layouts: Sequence[Layout], snapshot: Snapshot, objective: Objective) -> Ranking:
    """Forecast the present layout and those others that can be the best.

    A mixed layout lies between uniform ones: it can be the best one only if it lies between the
    best two.
    """
    present = snapshot.layout
    uniform = Ranking.of(
        [present, *(one for one in layouts if one.is_uniform)], snapshot, objective
    )
    figures = uniform.figures()
    best = sorted((one for one in figures if one.is_uniform), key=figures.__getitem__)[:2]
    sizes = {one.widest for one in best}
    mixed = [one for one in layouts if not one.is_uniform and sizes.issuperset(one.shape)]
    return uniform.with_more(Ranking.of(mixed, snapshot, objective))


def least_gain(stay: float, cost: float, snapshot: Snapshot, sooner: float = 0.0) -> float:
    """Return the request-seconds that a switch for load must gain if staying costs `stay` and the
    switch `cost`.

    The cost counts twice: the switch may have to be reversed. The gain has to exceed the doubt
    about the forecasts. Two switches in the last minute are a reason for more doubt, and more of
    them for more. The request-seconds that the present layout has lost already pay for the doubt.
    First tokens that come sooner, by the share `sooner`, take as much of the doubt away: while few
    requests run their time is known well. A switch for a long request has promised to be of use
    for a while, and that counts too.
    """
    doubt = (FORECAST_ERROR * max(1, snapshot.recent_switches) - sooner) * stay
    return max(0.0, doubt - snapshot.regret) + 2 * cost + snapshot.promised


def _decide_without_needs(snapshot: Snapshot, objective: Objective) -> Decision | None:
    """Switch back to single engines when no request needs a group: at once only if that outweighs
    earlier promises.
    """
    layout = snapshot.layout.apart()
    if layout == snapshot.layout or layout not in snapshot.layouts:
        return None
    ranking = Ranking.of([snapshot.layout, layout], snapshot, objective)
    considered = switching.costs(snapshot, layout, objective, ranking.measure, urgent=False)
    found = switching.decision(snapshot, layout, "no request needs a group", 0.0, considered)
    if not snapshot.promised:
        return found
    figures = ranking.figures()
    stay = figures[snapshot.layout]
    gain = stay - figures[layout]
    return replace(found, gain=gain, least_gain=least_gain(stay, found.cost, snapshot))
