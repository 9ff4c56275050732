"""Switches as counters and histograms, from the records that the controller keeps."""

from collections import Counter
from collections.abc import Reversible
from itertools import takewhile

from flying_serving.config import MODES
from flying_serving.controller.switches import Switch
from flying_serving.layout.groups import Layout
from flying_serving.observe.metrics.histogram import Histogram
from flying_serving.observe.metrics.table import CUTOVER_BOUNDS_S, DRAIN_BOUNDS_S, GAP_BOUNDS_S
from flying_serving.policy.snapshot import Decision


def shape(layout: Layout) -> str:
    """Return a layout as a label: sizes of its groups in order, `2+1+1`. Groups are aligned, so it
    stands for one layout.
    """
    return "+".join(str(len(group)) for group in layout.groups)


def reason_kind(decision: Decision | None) -> str:
    """Return the kinds of a switch's reasons, without the figures; `idle` if no reason names its
    kind.
    """
    if decision is None:
        return "operator"
    parts = [part.partition(":") for part in decision.reason.split("; ")]
    return "+".join(kind for kind, colon, _ in parts if colon) or "idle"


class SwitchFollower:
    """The changes of switches since its last look at their records."""

    def __init__(self) -> None:
        self._last_number = 0
        self._ordered: list[Switch] = []
        self._open: list[Switch] = []

    def look(self, records: Reversible[Switch]) -> tuple[list[Switch], list[Switch], list[Switch]]:
        """Return (begun, answered, over) switches, oldest first. A switch counts as answered after
        a failed answer too.
        """
        begun = list(
            takewhile(lambda switch: switch.number > self._last_number, reversed(records))
        )[::-1]
        if begun:
            self._last_number = begun[-1].number
        ordered = [*self._ordered, *begun]
        answered = [switch for switch in ordered if switch.is_answered]
        self._ordered = [switch for switch in ordered if not switch.is_answered]
        followed = [*self._open, *answered]
        self._open = [switch for switch in followed if switch.open]
        return begun, answered, [switch for switch in followed if not switch.open]


class SwitchTally:
    """Totals over all switches since the start."""

    def __init__(self) -> None:
        self.made: Counter[tuple[str, str, str, str]] = Counter()
        """The number of switches by (from, to, reason, mode)."""
        self.failed: Counter[str] = Counter(dict.fromkeys(MODES, 0))
        self.cutover_s = {mode: Histogram(CUTOVER_BOUNDS_S) for mode in MODES}
        self.drain_s = {mode: Histogram(DRAIN_BOUNDS_S) for mode in MODES}
        self.worst_gap_s = {mode: Histogram(GAP_BOUNDS_S) for mode in MODES}
        self._follower = SwitchFollower()

    def update(self, records: Reversible[Switch]) -> list[Switch]:
        """Count the news in the controller's records, oldest first. Returns the switches that are
        new.
        """
        begun, answered, ended = self._follower.look(records)
        for switch in answered:
            self._cut_over(switch)
        for switch in ended:
            if switch.cutover_ms is not None and switch.drain_ms is not None:
                self.drain_s[switch.mode].observe(switch.drain_ms / 1e3)
                self.worst_gap_s[switch.mode].observe(switch.worst_token_gap_ms / 1e3)
        return begun

    def _cut_over(self, switch: Switch) -> None:
        if switch.problem is not None:
            self.failed[switch.mode] += not switch.was_dropped
        elif switch.cutover_ms is not None:
            labels = (
                shape(switch.old),
                shape(switch.new),
                reason_kind(switch.decision),
                switch.mode,
            )
            self.made[labels] += 1
            self.cutover_s[switch.mode].observe(switch.cutover_ms / 1e3)
