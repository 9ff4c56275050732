"""What the client of the model does: it begins stages, sends requests on, aborts them, and counts
what is done.
"""

from __future__ import annotations

from tests.explorer import Wrong
from tests.with_vllm.protocol.client import (
    Abort,
    ClientMessage,
    Job,
    Order,
    Retain,
    TellWeights,
    request_of,
)
from tests.with_vllm.protocol.endpoints import Endpoints
from tests.with_vllm.protocol.events import Label
from tests.with_vllm.protocol.faults import Fault
from tests.with_vllm.protocol.scenario import Client, Lent, Scenario, Stage, Status


class Dispatcher:
    """What the client says, in any state that it may be in.

    Args:
        scenario: what there is to do.
        endpoints: all that were met; a method has the numbers of the present ones, which it
            changes.
        fault: what is broken.
    """

    def __init__(self, scenario: Scenario, endpoints: Endpoints, fault: Fault | None) -> None:
        self.numbers = {
            name: n
            for n, name in enumerate(dict.fromkeys(request_of(job.name) for job in scenario.jobs))
        }
        """Of requests."""
        self._scenario = scenario
        self._engines = range(scenario.settings.engines)
        self._lenders = range(scenario.settings.sizes[-1])
        """Engines whose weights are lent: those of the first widest group."""
        self._endpoints = endpoints
        self._fault = fault

    def begin_stages(self, endpoints: list[int], client: Client) -> tuple[list[int], Client]:
        """Send the next stage, and what follows it as long as there is no order to wait for."""
        while client.stage + 1 < len(self._scenario.stages):
            stage = self._scenario.stages[client.stage + 1]
            if client.unanswered.intersection(
                self._engines if stage.layout else self._regrouped(client.stage)
            ):
                break
            if not self._may_begin(stage, client):
                break
            alive = [
                engine for engine in self._engines if not self._endpoints.is_gone(endpoints[engine])
            ]
            unanswered = frozenset(alive) if stage.layout else client.unanswered
            client = client._replace(stage=client.stage + 1, unanswered=unanswered)
            if stage.lends is not None:
                client = self._tell(endpoints, client, Lent.READY if stage.lends else Lent.FETCHING)
            for engine, size in enumerate(stage.layout):
                self._say(endpoints, engine, Order(size, stage.mode))
            leaving = [
                client.requests[self.numbers[request_of(job.name)]]
                for job in stage.jobs
                if job.source
            ]
            left = {job.leader for status, job, _ in leaving if job and status is Status.OPEN}
            for engine in alive if self._tells_all(client.stage) else ():
                if engine not in left:
                    self._say(endpoints, engine, Retain())
            for job in stage.jobs:
                client = self._dispatch(endpoints, client, job)
        return endpoints, client

    def _may_begin(self, stage: Stage, client: Client) -> bool:
        """Whether weights are where they have to be, and requests are over that have to be."""
        is_over = all(
            client.requests[self.numbers[name]][0] is not Status.OPEN for name in stage.after
        )
        needs_all = stage.layout or any(map(self._needs_weights, stage.jobs))
        when = (
            Lent.LENT
            if stage.lends is False
            else Lent.WHOLE
            if needs_all or stage.lends
            else stage.when
        )
        return is_over and when in (None, client.weights)

    def _needs_weights(self, job: Job) -> bool:
        return job.leader in self._lenders and job.size < len(self._lenders)

    def _tell(self, endpoints: list[int], client: Client, weights: Lent) -> Client:
        """Tell the engines of the group that lends what becomes of weights."""
        what = {Lent.READY: "prepare", Lent.LENDING: "lend", Lent.FETCHING: "take_back"}[weights]
        for engine in self._lenders:
            self._say(endpoints, engine, TellWeights(what))
        return client._replace(weights=weights, awaited=frozenset(self._lenders))

    def answer(self, endpoints: list[int], client: Client, engine: int) -> Client:
        """An engine has done what it was told of its weights. When all have, the next is told."""
        client = client._replace(awaited=client.awaited - {engine})
        if client.awaited and not (
            self._fault is Fault.NOT_ALL_READY and client.weights is Lent.READY
        ):
            return client
        if client.weights is Lent.READY:
            return self._tell(endpoints, client, Lent.LENDING)
        return client._replace(weights=Lent.LENT if client.weights is Lent.LENDING else Lent.WHOLE)

    def _regrouped(self, stage: int) -> list[int]:
        """Engines whose groups change by the last order."""
        layouts = [
            self._scenario.first,
            *(each.layout for each in self._scenario.stages[: stage + 1] if each.layout),
        ]
        return [
            engine
            for engine in self._engines
            if len(layouts) > 1 and layouts[-1][engine] != layouts[-2][engine]
        ]

    def _dispatch(self, endpoints: list[int], client: Client, job: Job) -> Client:
        number = self.numbers[request_of(job.name)]
        status, before, part = client.requests[number]
        if status is not Status.OPEN:
            return client
        goes_on = before is not None and job.is_rest_of(before)
        if before is not None and not goes_on:
            leaves = (
                Abort(before.name) if job.source is None else Retain(before.name, job.source.number)
            )
            self._say(endpoints, before.leader, leaves)
        if part is not None and part.name != job.name:
            self._say(endpoints, part.leader, Abort(part.name))
        copies = 2 if self._fault is Fault.ADDED_TWICE and job.size > 1 else 1
        for _ in range(0 if self._fault is Fault.NOT_ADDED and job.leader == 2 else copies):
            self._say(endpoints, job.leader, job)
        if job.ahead is not None:
            return client.with_request(number, status, before, job)
        has_ended = before is not None and before.name in self._scenario.handoffs
        return client.with_request(
            number, status, job, before if goes_on and not has_ended else None
        )

    def complete(self, endpoints: list[int], client: Client, name: str, label: Label) -> Client:
        """A job is done. What is said of a job that is not the request's present one is stale.
        Raises Wrong.
        """
        number = self.numbers[request_of(name)]
        status, job, part = client.requests[number]
        ended = (Status.DONE, Status.FAILED)
        if job is None or job.name != name or status not in (Status.OPEN, *ended):
            return client
        if status in ended:
            raise Wrong(f"{name} was completed, and was {status.value} before", label)
        if name in self._scenario.handoffs:
            return self._dispatch(endpoints, client, self._scenario.handoffs[name])
        if part is not None and part.ahead is not None:
            self._say(endpoints, part.leader, Abort(part.name))
        return client.with_request(number, Status.DONE, job)

    def fail(self, client: Client, name: str, label: Label) -> Client:
        """A job has ended with an error; stale if it is not the request's present one. Raises
        Wrong.
        """
        number = self.numbers[request_of(name)]
        status, job, _ = client.requests[number]
        if job is None or job.name != name:
            return client
        if status in (Status.DONE, Status.FAILED):
            raise Wrong(f"{name} ends with an error, and was {status.value}", label)
        return client.with_request(number, Status.FAILED, job) if status is Status.OPEN else client

    def abort(self, endpoints: list[int], client: Client, name: str) -> Client | None:
        """Say that nobody wants a request any more; None if that makes no difference."""
        status, *parts = client.requests[self.numbers[name]]
        if status is not Status.OPEN:
            return None
        for part in parts:
            if part is not None:
                self._say(endpoints, part.leader, Abort(part.name))
        return client.with_request(self.numbers[name], Status.ABORTED, parts[0])

    def are_quiet(self, client: Client) -> tuple[bool, ...]:
        """Return, by engine, whether the client has sent it all that it ever will."""
        later = self._scenario.stages[client.stage + 1 :]
        tells_all = (
            any(stage.layout or stage.lends is not None for stage in later)
            or client.weights is Lent.READY
        )
        if tells_all or self._tells_all(client.stage + 1):
            return (False,) * len(self._engines)
        jobs = [job for stage in later for job in stage.jobs] + list(
            self._scenario.handoffs.values()
        )
        split = [job for job in self._scenario.jobs if job.ahead is not None]
        changing = {request_of(job.name) for job in (*jobs, *split)} | set(self._scenario.aborts)
        leaving = [client.requests[self.numbers[name]] for name in changing]
        parts = [job for status, *each in leaving for job in each if job and status is Status.OPEN]
        told = {job.leader for job in (*jobs, *parts)}
        return tuple(engine not in told for engine in self._engines)

    def _tells_all(self, stage: int) -> bool:
        """Whether all engines wait to be told which requests leave, after the order of the stage
        before.
        """
        stages = self._scenario.stages
        return 0 < stage < len(stages) and stages[stage - 1].mode == "migrate"

    def _say(self, endpoints: list[int], engine: int, client_message: ClientMessage) -> None:
        endpoints[engine] = self._endpoints.say(endpoints[engine], client_message)
