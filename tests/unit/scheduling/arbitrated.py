"""Engines in a layout with their arbiters, and the steps that they made."""

from itertools import groupby
from typing import Any

from flying_serving.layout.groups import Group, Layout
from flying_serving.scheduling.arbiter import LaneArbiter
from tests.unit.scheduling.virtual_node import NEVER, VirtualNode

GROUPS = [group for size in (1, 2, 4) for group in Layout.uniform(4, size).groups]
PRESENT = ([4, 4, 4, 4], [2, 2, 2, 2], [1, 1, 1, 1], [2, 2, 1, 1], [1, 1, 2, 2])
EVENLY_S = 0.02
ORDER_S = 0.001


def node(
    present: list[int],
    busy: set[Group],
    *,
    hard: bool = False,
    k: int = 1,
    max_pause_s: float = 1e6,
    step_s: Any = None,
) -> VirtualNode:
    """Return engines in a layout, their steps of 20 ms each unless said otherwise."""
    arbiters = [LaneArbiter(k, max_pause_s) for _ in present]
    for one, size in zip(arbiters, present, strict=True):
        one.switch(size, hard=hard, weave_steps=k, now_s=0.0)
    return VirtualNode(arbiters, busy, step_s or (lambda group: EVENLY_S), lambda: ORDER_S)


def steps(
    node: VirtualNode, engine: int, size: int | None = None
) -> list[tuple[float, float, int]]:
    """Return (began, ended, size) of an engine's steps that are done."""
    return [
        step for step in node.engines[engine].ran if step[1] < NEVER and size in (None, step[2])
    ]


def runs(node: VirtualNode, engine: int) -> list[tuple[int, int]]:
    """Return (size, how many in a row) of an engine's steps, the first and the last run left
    out.
    """
    return [
        (size, len(list(same))) for size, same in groupby(step[2] for step in steps(node, engine))
    ][1:-1]
