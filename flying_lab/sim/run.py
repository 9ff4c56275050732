"""The run of a workload on a simulated system, and its outcome in the form of a benchmark's
results.
"""

from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from flying_lab.results.record import Record
from flying_lab.results.results import Results, Run
from flying_lab.sim.fleet import Fleet
from flying_lab.sim.node import System
from flying_lab.sim.outcome import Outcome
from flying_lab.sim.requests import SimRequest
from flying_lab.workload.model import Request, Workload


@dataclass(frozen=True)
class Simulated:
    """The run of one system, with its outcome."""

    system: System
    outcome: Outcome
    results: Results
    summary: dict[str, Any]

    @property
    def log(self) -> dict[str, Any] | None:
        """Return its switches in the form of a live server's log, times since the start of the
        workload; None of several nodes.
        """
        if not self.outcome.layouts:
            return None
        return {
            "layout": self.outcome.layouts[-1].layout.to_lists(),
            "devices_per_engine": self.system.settings.capacity.degree(1),
            "switches": [switch.to_json() for switch in self.outcome.switches],
        }


def simulate(
    system: System, requests: Iterable[Request], progress: Callable[[int], None] | None = None
) -> Outcome:
    """Serve requests, in the order of arrival, until all are over; `progress` gets the number of
    finished ones now and then.
    """
    fleet = Fleet(system)
    fleet.run(requests, progress)
    return fleet.outcome()


def results(system: System, workload: Workload, outcome: Outcome, where: str) -> Results:
    """Return the same table that `flying-serving bench` makes of a live server.

    Without kept times, a request gets its first token and, at its end, all others. Its time in the
    queue is that from the end of the API server's work to the begin of its first step. `where`:
    model and hardware.
    """
    over = {request.request_id: request for request in outcome.ended}
    reasons = {request.request_id: reason for request, reason in outcome.refused}
    records = []
    for request in workload.requests:
        name = str(request.index)
        if name in over:
            records.append(_served(request, over[name], system.shape.frontend_s))
        else:
            records.append(Record(request, "failed", reasons[name], request.arrival_s))
    end_s = max((request.end_s for request in outcome.ended), default=workload.duration_s)
    run = Run(
        workload.name, workload.origin, workload.seed, f"simulated {system.name}", where, 0.0, end_s
    )
    return Results.of(run, records)


def _served(request: Request, simulated: SimRequest, frontend_s: float) -> Record:
    record = Record(
        request, "ok", None, request.arrival_s, simulated.first_token_s, simulated.end_s
    )
    record.finish_reason = "length"
    record.queue_s = max(0.0, simulated.begun_s - simulated.arrival_s - frontend_s)
    record.usage_tokens = simulated.tokens
    if simulated.token_s is not None:
        record.token_s = simulated.token_s
        record.token_counts = array("i", [1]) * len(simulated.token_s)
    else:
        rest = simulated.tokens - 1
        record.token_s = array("d", [simulated.first_token_s, simulated.end_s][: 1 + (rest > 0)])
        record.token_counts = array("i", [1, rest][: 1 + (rest > 0)])
    return record
