"""Which engine is lost where, when and how: the cases of `benchmarks/chaos.py`."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from flying_serving.layout.groups import Group, Layout

LAYOUTS: dict[str, list[list[int]]] = {
    "1+1+1+1": [[0], [1], [2], [3]],
    "2+2": [[0, 1], [2, 3]],
    "4": [[0, 1, 2, 3]],
    "2+1+1": [[0, 1], [2], [3]],
}
OTHERS = {"1+1+1+1": "2+2", "2+2": "1+1+1+1", "4": "1+1+1+1", "2+1+1": "1+1+1+1"}
"""In phases of a switch the layout changes to and fro between the two."""
SIGNALS = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP}
PLAIN = ("idle", "prefill", "decode", "collective")
PULLS = ("pull open", "pull half", "pull sealed")
BLOCKS = ("blocks asked", "blocks reserved", "blocks lent", "release", "reclaim")
SWITCHING = (*BLOCKS, "order sent", "order acknowledged", *PULLS)
SPLITS = ("split before", "split after")
AGAIN = "starting again"
PHASES = (*PLAIN, *SWITCHING, *SPLITS, AGAIN)
ALONE = ("idle", "prefill", "decode", *SWITCHING, AGAIN)
"""Phases that engines which are alone in their groups have, some of them on the way to the other
layout.
"""


@dataclass(frozen=True)
class Case:
    """The engine `victim` is lost in a phase of a layout; `role`: it leads its group, is a member,
    or owns the KV.
    """

    phase: str
    layout: str
    role: str
    how: str
    victim: int
    repetition: int

    @property
    def name(self) -> str:
        """For a line of a table or a log."""
        return (
            f"{self.phase}, {self.layout}, {self.role}, {self.how} engine {self.victim} "
            f"({self.repetition})"
        )

    @property
    def mode(self) -> str:
        """The way of switching that leads to the phase."""
        return "migrate" if self.phase in PULLS else "weave"

    @property
    def groups_left(self) -> int:
        """How many groups there are once the engine is lost; where the layout changes to and fro,
        the fewer of both.
        """
        names = (self.layout, OTHERS[self.layout]) if self.phase in SWITCHING else (self.layout,)
        layouts = [Layout(tuple(map(tuple, LAYOUTS[name]))) for name in names]
        return min(len(layout.without({self.victim}).groups) for layout in layouts)

    @property
    def skip(self) -> int:
        """How many times the phase is passed before: some steps, some collectives of one."""
        return {"decode": 3, "collective": 5 + 7 * self.repetition}.get(
            self.phase, self.repetition % 2
        )


def cases(
    phases: Sequence[str] = PHASES,
    layouts: Sequence[str] = tuple(LAYOUTS),
    hows: Sequence[str] = tuple(SIGNALS),
    times: int = 3,
) -> Iterator[Case]:
    """All cases, by layout, so that it seldom changes without need."""
    for layout in layouts:
        for phase in phases:
            for role in _roles(phase, layout):
                for how in hows:
                    for repetition in range(times):
                        yield Case(
                            phase,
                            layout,
                            role,
                            how,
                            _victim(phase, layout, role, repetition),
                            repetition,
                        )


def _roles(phase: str, layout: str) -> tuple[str, ...]:
    is_alone = layout == "1+1+1+1"
    if phase in SPLITS:  # by two groups of one size
        members = ("member",) if layout == "2+2" else ()
        owners = ("owner",) if phase == "split after" else ()
        return () if layout == "4" else ("leader", *members, *owners)
    if phase in PULLS:
        return ("leader", "owner") if is_alone else ("leader", "member", "owner")
    if is_alone:
        return ("leader",) if phase in ALONE else ()
    return ("leader", "member")


def _victim(phase: str, layout: str, role: str, repetition: int) -> int:
    groups: list[Group] = [tuple(group) for group in LAYOUTS[layout]]
    if phase in SPLITS and layout == "2+1+1":
        groups = groups[1:]
    if layout == "1+1+1+1" and phase in SWITCHING:
        groups = [tuple(group) for group in LAYOUTS[OTHERS[layout]]]
    if layout == "2+1+1" and phase not in SPLITS:
        groups = groups[:1]
    group = groups[repetition % len(groups)]
    return (
        group[0]
        if role == "leader" or len(group) == 1
        else group[1 + repetition % (len(group) - 1)]
    )
