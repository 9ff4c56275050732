"""Switches as counters and histograms, from the records that the controller keeps."""

from __future__ import annotations

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
    """A layout as a label: sizes of its groups in order, `2+1+1`. Groups are aligned, so it stands for one layout."""
    return "+".join(str(len(group)) for group in layout.groups)


def reason_kind(decision: Decision | None) -> str:
    """The use cases that a switch was made for, without the figures."""
    if decision is None:
        return "operator"
    parts = [part.partition(":") for part in decision.reason.split("; ")]
    return "+".join(kind for kind, colon, _ in parts if colon) or "idle"


class SwitchTally:
    """Totals over all switches since the start."""

    def __init__(self) -> None:
        self.made: Counter[tuple[str, str, str, str]] = Counter()
        """By (from, to, reason, mode)."""
        self.failed: Counter[str] = Counter(dict.fromkeys(MODES, 0))
        self.cutover_s = {mode: Histogram(CUTOVER_BOUNDS_S) for mode in MODES}
        self.drain_s = {mode: Histogram(DRAIN_BOUNDS_S) for mode in MODES}
        self.worst_gap_s = {mode: Histogram(GAP_BOUNDS_S) for mode in MODES}
        self._last_number = 0
        self._ordered: list[Switch] = []
        self._draining: list[Switch] = []

    def update(self, kept: Reversible[Switch]) -> list[Switch]:
        """Take what is new in the controller's records, oldest first. Returns the switches that are new."""
        begun = list(takewhile(lambda switch: switch.number > self._last_number, reversed(kept)))[::-1]
        if begun:
            self._last_number = begun[-1].number
        for switch in [*self._ordered, *begun]:
            self._cut_over(switch)
        self._ordered = [s for s in [*self._ordered, *begun] if s.cutover_ms is None and s.problem is None]
        for switch in self._draining:
            if switch.drain_ms is not None and not switch.open:
                self.drain_s[switch.mode].observe(switch.drain_ms / 1e3)
                self.worst_gap_s[switch.mode].observe(switch.worst_token_gap_ms / 1e3)
        self._draining = [switch for switch in self._draining if switch.open]
        return begun

    def _cut_over(self, switch: Switch) -> None:
        if switch.problem is not None:
            self.failed[switch.mode] += not switch.was_dropped
        elif switch.cutover_ms is not None:
            labels = (shape(switch.old), shape(switch.new), reason_kind(switch.decision), switch.mode)
            self.made[labels] += 1
            self.cutover_s[switch.mode].observe(switch.cutover_ms / 1e3)
            self._draining.append(switch)
