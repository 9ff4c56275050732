"""What became of the requests of a node, and which layouts it had."""

from dataclasses import dataclass, field
from typing import NamedTuple

from flying_lab.sim.requests import SimRequest
from flying_serving.controller.switches import Switch
from flying_serving.layout.groups import Layout


class Refusal(NamedTuple):
    """A request that was not served."""

    request: SimRequest
    reason: str


class LayoutChange(NamedTuple):
    """The controller's layout from a time on."""

    at_s: float
    layout: Layout


@dataclass
class Outcome:
    """What became of the requests of a node, its layouts and switches, and when weights began to be
    lent.
    """

    ended: list[SimRequest] = field(default_factory=list)
    refused: list[Refusal] = field(default_factory=list)
    layouts: list[LayoutChange] = field(default_factory=list)
    switches: list[Switch] = field(default_factory=list)
    loans: list[float] = field(default_factory=list)
