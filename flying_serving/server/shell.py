"""The controller's shell in the API server: reports events to it and carries out its commands."""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from http import HTTPStatus
from typing import Any

from vllm.v1.engine import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineCoreRequestType,
    FinishReason,
)
from vllm.v1.engine.exceptions import EngineDeadError

from flying_serving.controller.commands import (
    Command,
    Dispatch,
    DispatchPrefix,
    DropPart,
    Fail,
    Order,
    PartCommand,
    PullAhead,
    Recall,
    Reject,
    RequestCommand,
    RevokeOffer,
    Weave,
    WeightCommand,
)
from flying_serving.controller.controller import Controller
from flying_serving.controller.settings import Settings
from flying_serving.layout.groups import Group
from flying_serving.log import logger
from flying_serving.server.calls.engine_calls import EngineCalls, consume_exception
from flying_serving.server.calls.engine_figures import LastFigures
from flying_serving.server.calls.layout_orders import LayoutOrders
from flying_serving.server.calls.weight_orders import WeightOrders
from flying_serving.server.figures.losses import Losses
from flying_serving.server.requests.checks import Checks, as_refusals_of_vllm
from flying_serving.server.requests.draining import Draining
from flying_serving.server.requests.origin import origin_of
from flying_serving.server.requests.streams import Streams
from flying_serving.vllm_adapter.scheduler.beginnings import is_beginning
from flying_serving.vllm_adapter.scheduler.history import why_not_migratable


class Shell:
    """Requests, outputs and orders of one server, each reported to the controller. `clock`: its
    time in seconds.
    """

    def __init__(
        self,
        calls: EngineCalls,
        settings: Settings,
        model_config: Any,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.calls = calls
        self.clock = clock
        self.model_config = model_config
        self.controller = Controller(settings)
        self.streams = Streams(settings.capacity, model_config.max_model_len)
        self.checks = Checks(calls, self.controller, self.streams)
        self.orders = LayoutOrders(calls, self.controller, self.carry_out, self.clock)
        self.weights = WeightOrders(calls, self.controller, self.carry_out, self.clock)
        self.figures = LastFigures(calls)
        self.losses = Losses(calls.records)
        self.draining = Draining()

    # ---- requests

    async def add(self, request: EngineCoreRequest) -> None:
        """Hand a request to the controller; return when it waits for a group, or is sent to one.

        If that fails, or the client leaves meanwhile, the request is forgotten.

        Raises:
            VLLMValidationError: if no layout of this server can run it (HTTP 400).
            GracefulHTTPError: if too many wait (429) and it has no slot, or the server
                ends (503).
        """
        try:
            await self.carry_out(self._take_in(request))
        except BaseException:  # vLLM has noted the request, and ends only requests that it got back
            await self.abort(self.calls.channel.forget(request.request_id))
            raise

    def _take_in(self, request: EngineCoreRequest) -> list[Command]:
        """Check a request and open its stream. Returns the controller's commands. Raises as
        `add`.
        """
        self.checks.check_end(request.external_req_id)
        spec = self.checks.checked_spec(
            {name: getattr(request, name) for name in request.__struct_fields__}
        )
        can_migrate = why_not_migratable(request, self.model_config) is None
        spec = replace(spec, can_migrate=can_migrate, prompt_splits=not request.mm_features)
        with as_refusals_of_vllm(spec):
            commands = self.controller.arrived(
                request.request_id, spec, self.clock(), origin_of(request)
            )
        self.streams.open(request)
        return commands

    async def abort(self, request_ids: list[str]) -> None:
        """Abort requests where they run, or forget them if they wait."""
        if self.calls.channel.engines_dead:
            return
        by_group: dict[Group, list[str]] = {}
        for request_id in request_ids:
            group = self.controller.state.group_of(
                request_id
            ) or self.controller.state.pool.kv_group(request_id)
            if group is not None:
                by_group.setdefault(group, []).append(self.streams.engine_id(request_id))
            self.streams.close(request_id)
        sent = [self._abort_in(group, *ids) for group, ids in by_group.items()]
        commands = self.controller.finished(request_ids, self.clock(), aborted=True)
        await asyncio.shield(consume_exception(asyncio.gather(*sent, self.carry_out(commands))))

    async def abort_all(self) -> None:
        """End every request, also requests that wait or migrate; clients get the tokens so far."""
        request_ids = self.controller.state.open_requests
        self.calls.channel.end_requests(request_ids, FinishReason.ABORT)
        await self.abort(request_ids)

    async def take_outputs(self, outputs: EngineCoreOutputs) -> None:
        """Take a batch of outputs of an engine: note tokens and ends, and drop stale outputs."""
        now_s = self.clock()
        shown, full = list[EngineCoreOutput](), list[EngineCoreOutput]()
        finished, failed, prefixes = (
            list[str](),
            list[Fail](),
            list[tuple[str, EngineCoreOutput]](),
        )
        for output in outputs.outputs:
            if is_beginning(output):
                self._note_begun(output.request_id)
            elif request_id := self.streams.end_prefix(output):
                prefixes.append((request_id, output))
            elif failure := self.streams.failure_in(output):
                failed.append(failure)
            elif self.streams.note_tokens(output):
                shown.append(output)
                self.controller.got_tokens(output.request_id, len(output.new_token_ids), now_s)
                if self.streams.is_full(output):
                    full.append(output)
                elif output.finish_reason is not None:
                    finished.append(output.request_id)
        outputs.outputs = shown

        # ends come first: the commands after a full group may move any request that has not ended
        commands = self._finish(finished, now_s) + self.controller.requests_failed(failed, now_s)
        for request_id, output in prefixes:
            is_lost = output.finish_reason not in (FinishReason.LENGTH, FinishReason.STOP)
            commands += self.controller.prefix_ended(request_id, now_s, failed=is_lost)
        for output in full:
            commands += self._group_full(output, finished, now_s)

        if finished:
            outputs.finished_requests = set(finished)
        await self.carry_out(commands)

    def _group_full(
        self, output: EngineCoreOutput, finished: list[str], now_s: float
    ) -> list[Command]:
        """Continue a request that fills its group in another one, or end it if no group can hold
        it.
        """
        continuing = self.controller.group_full(output.request_id, now_s)
        if continuing is None:
            self.carry_out(self.controller.ends_at_full_group(output.request_id))
            finished.append(output.request_id)
            return self._finish([output.request_id], now_s)
        output.finish_reason = output.stop_reason = None
        return continuing

    def _note_begun(self, engine_id: str) -> None:
        # the request may have left that engine by now: it has begun all the same
        if request_id := self.streams.request_of(engine_id):
            self.controller.state.deadlines.drop(request_id)

    def _finish(self, request_ids: list[str], now_s: float) -> list[Command]:
        for request_id in request_ids:
            self.streams.close(request_id)
        return self.controller.finished(request_ids, now_s) if request_ids else []

    # ---- commands of the controller

    def carry_out(self, commands: list[Command], paused: Iterable[int] = ()) -> Awaitable[Any]:
        """Carry out commands in order. Returns an awaitable that is done when all messages to
        engines are sent.

        This happens at once, because the commands are about the present. If an output or another
        decision came in between, a request could be recalled from a group that it has left.

        A command that fails ends its request, its part of a split one or its order, and the others
        are carried out.

        `paused`: engines whose older lanes pause until they hear which requests leave, or that none
        does. All requests that leave an engine at the same time are named in one message, before
        any of them is sent on.

        Raises:
            EngineDeadError: if engines are dead, when every command that needs none is carried out.
        """
        sent, left, failed = list[Awaitable[Any]](), deque(commands), set[str]()
        retained: dict[int, list[tuple[str, int]]] = {engine: [] for engine in paused}
        dead: EngineDeadError | None = None
        while left:
            command = left.popleft()
            if isinstance(command, RequestCommand) and command.request_id in failed:
                continue
            if (
                isinstance(command, Recall | DropPart)
                and (leaving := self.streams.take_out(command)) is not None
            ):
                retained.setdefault(command.group[0], []).append(leaving)
                continue
            self._retain(retained)
            try:
                sent += self._do(command)
            except EngineDeadError as error:
                dead = error
            except Exception as error:  # noqa: BLE001 - after any error the other commands are carried out
                left += self._end_failed(command, error, failed)
        self._retain(retained)
        # shielded: a client that leaves must not cancel messages of others
        on_their_way = consume_exception(asyncio.shield(consume_exception(asyncio.gather(*sent))))
        if dead is not None:
            raise dead
        return on_their_way

    def _do(self, command: Command) -> list[Awaitable[Any]]:
        """Carry out a command. Returns its messages as awaitables."""
        match command:
            case Dispatch():
                return self._send(self.streams.dispatch(command), command.group)
            case DispatchPrefix():
                return self._send(self.streams.dispatch_prefix(command), command.group)
            case PullAhead():
                return self._send(self.streams.pull_ahead(command), command.group)
            case DropPart(request_id, group, offer):
                return [self._abort_in(group, self.streams.drop_part(request_id, offer))]
            # a Recall without an offer; `_retain` has those with one
            case Recall(request_id, group) | RevokeOffer(request_id, group):
                return [self._abort_in(group, self.streams.detach(request_id))]
            case Reject(request_id, waited_s, group):
                queued = self.streams.detach(request_id)
                message = f"the request waited {waited_s:.1f} s, longer than its queue_deadline_s"
                self._fail(request_id, message, HTTPStatus.GATEWAY_TIMEOUT)
                return [] if group is None else [self._abort_in(group, queued)]
            case Fail(request_id, why):
                self._fail(request_id, why, HTTPStatus.INTERNAL_SERVER_ERROR)
            case Order(switch, weave_steps):
                self.orders.tell_engines(switch, weave_steps)
            case Weave(engines):
                self.orders.weave(engines)
            case _:  # a WeightCommand
                self.weights.tell(command)
        return []

    def _retain(self, retained: dict[int, list[tuple[str, int]]]) -> None:
        """Tell leaders which requests leave them, and under which numbers they offer their KV from
        now on.
        """
        for leader, leaving in retained.items():
            self.calls.tell(leader, "flying_retain", leaving)
        retained.clear()

    def _send(self, request: EngineCoreRequest | None, group: Group) -> list[Awaitable[Any]]:
        """Send a group's leader a request, unless it is over by now (None)."""
        if request is None:
            return []
        return [self.calls.send(EngineCoreRequestType.ADD, request, group[0])]

    def _abort_in(self, group: Group, *engine_ids: str) -> Awaitable[Any]:
        """Have a group's leader abort requests, by their ids in its engine."""
        return self.calls.send(EngineCoreRequestType.ABORT, list(engine_ids), group[0])

    def _fail(self, request_id: str, why: str, status: HTTPStatus) -> None:
        self.streams.close(request_id)
        self.calls.channel.fail_request(request_id, why, status)

    def _end_failed(self, command: Command, error: Exception, failed: set[str]) -> list[Command]:
        """End an order, a part, or a request that cannot be sent to an engine, with an error (HTTP
        500).

        Adds a request to `failed` if its later commands are void.
        """
        if isinstance(command, Order):
            self.orders.failed(command.switch, error)
            return []
        if isinstance(command, Weave | WeightCommand):
            return []  # the server ends
        request_id = command.request_id
        logger.error("request %r cannot be sent to an engine", request_id, exc_info=error)
        if isinstance(command, PartCommand):
            return self.controller.part_failed(request_id)
        if isinstance(command, RequestCommand):
            failed.add(request_id)
        self.streams.close(request_id)
        self.calls.channel.end_requests([request_id], FinishReason.ERROR)
        return self.controller.finished([request_id], self.clock(), aborted=True)
