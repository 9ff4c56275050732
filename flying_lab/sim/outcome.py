"""The outcome of a simulated node: its requests, layouts and switches."""

from dataclasses import dataclass, field
from typing import NamedTuple

from flying_lab.sim.requests import SimRequest
from flying_serving.controller.switches import Switch
from flying_serving.layout.groups import Layout


class Refusal(NamedTuple):
    """A request that was not served, and why."""

    request: SimRequest
    reason: str


class LayoutChange(NamedTuple):
    """The controller's layout from a time on."""

    at_s: float
    layout: Layout


@dataclass
class Outcome:
    """The outcome of a node: its requests, layouts and switches, and the times when a loan of
    weights began.
    """

    ended: list[SimRequest] = field(default_factory=list)
    refused: list[Refusal] = field(default_factory=list)
    layouts: list[LayoutChange] = field(default_factory=list)
    switches: list[Switch] = field(default_factory=list)
    loans: list[float] = field(default_factory=list)
