"""The part of the engine client that takes vLLM's requests: in, out and away, each told to the controller."""

from __future__ import annotations

import asyncio
import logging
import time
from abc import abstractmethod
from collections.abc import Awaitable, Mapping
from dataclasses import replace
from http import HTTPStatus
from typing import Any

from vllm.exceptions import GracefulHTTPError, VLLMValidationError
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, EngineCoreRequestType, FinishReason

from flying_serving.controller.commands import Command
from flying_serving.controller.requests import RequestSpec
from flying_serving.errors import PoolFull, RequestError
from flying_serving.layout.groups import Group
from flying_serving.server.calls import EngineCalls, heard
from flying_serving.server.encoding import check_encodable
from flying_serving.server.ending import refusal
from flying_serving.server.streams import DEGREE_KEY, Streams, prompt_length
from flying_serving.vllm_adapter.history import why_it_stays

logger = logging.getLogger("vllm.flying_serving")


class EngineRequests(EngineCalls):
    """vLLM's client for several engines, with a controller that says where each request runs."""

    streams: Streams
    _deadlines: dict[str, asyncio.Future[None]]

    @abstractmethod
    def _ensure_clock(self) -> None: ...

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        """Hand a request to the controller, which sends it to a group or lets it wait for one.

        Raises:
            VLLMValidationError: if no layout of this server can run it (HTTP 400).
            GracefulHTTPError: if too many wait (429), or it has waited beyond its deadline (504).
        """
        request.client_index = self.client_index
        self._ensure_output_queue_task()
        self._ensure_clock()
        fields = {name: getattr(request, name) for name in request.__struct_fields__}
        movable = why_it_stays(request, self.vllm_config.model_config) is None
        wanted = replace(self.check(fields), movable=movable)
        self.streams.open(request)
        commands = self.controller.arrived(request.request_id, wanted, time.monotonic())
        expires = None
        if wanted.deadline_s is not None and request.request_id in self.controller.pool:
            expires = self._deadlines[request.request_id] = asyncio.get_running_loop().create_future()
        await self.carry_out(commands)
        if expires is not None:
            await expires

    def check(self, fields: Mapping[str, Any]) -> RequestSpec:
        """What a request wants, if it can be taken. Raises as `add_request_async`, which a stream calls too late.

        Args:
            fields: of an `EngineCoreRequest`, by name, or of what becomes one.
        """
        if self.ending:
            raise refusal()
        check_encodable({name: value for name, value in fields.items() if name != "prompt_embeds"}, self.encoder.encode)
        most_urgent = self.deployment.flying.most_urgent_priority
        if most_urgent is not None and fields["priority"] < most_urgent:
            allowed = f"must be {most_urgent} or more on this server (--most-urgent-priority)"
            raise VLLMValidationError(f"priority={fields['priority']}: {allowed}", parameter="priority")
        prompt = prompt_length(fields["prompt_token_ids"], fields["prompt_embeds"])
        wanted = self.streams.wanted(prompt, fields["sampling_params"], fields["priority"])
        try:
            self.controller.check(wanted)
        except RequestError as error:
            if wanted.degree is None:
                raise VLLMValidationError(str(error)) from None
            raise VLLMValidationError(f"vllm_xargs.{error}", parameter=f"vllm_xargs.{DEGREE_KEY}") from None
        except PoolFull as error:
            raise GracefulHTTPError(str(error), HTTPStatus.TOO_MANY_REQUESTS) from None
        return wanted

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        """Abort wherever they run, or forget them if they wait."""
        if self.resources.engine_dead:
            return
        by_group: dict[Group, list[str]] = {}
        for request_id in request_ids:
            group = self.controller.group_of(request_id)
            if group is not None:
                by_group.setdefault(group, []).append(self.streams.engine_id(request_id))
            self._forget(request_id)
        sent = [self._to_leader(EngineCoreRequestType.ABORT, ids, group) for group, ids in by_group.items()]
        commands = self.controller.finished(request_ids, time.monotonic(), aborted=True)
        await asyncio.shield(heard(asyncio.gather(*sent, self.carry_out(commands))))

    async def process_engine_outputs(self, outputs: EngineCoreOutputs) -> None:
        """vLLM calls this for each batch of outputs: note tokens and ends; drop what is stale."""
        now = time.monotonic()
        over: list[str] = []
        commands: list[Command] = []
        outputs.outputs = [output for output in outputs.outputs if self.streams.take(output)]
        for output in outputs.outputs:
            self.controller.tokens(output.request_id, len(output.new_token_ids), now)
            if output.finish_reason is None:
                continue
            if self.streams.is_full(output):
                moved = self.controller.outgrew(output.request_id, now)
                if moved is not None:
                    output.finish_reason = output.stop_reason = None
                    commands += moved
                    continue
            over.append(output.request_id)
            self._forget(output.request_id)
        if over:
            outputs.finished_requests = set(over)
            commands += self.controller.finished(over, now)
        await self.carry_out(commands)

    def _forget(self, request_id: str) -> None:
        self.streams.close(request_id)
        self._admit(request_id)

    def _admit(self, request_id: str) -> None:
        waiting = self._deadlines.pop(request_id, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(None)

    def _fail(self, request_id: str, error: Exception) -> list[Command]:
        """What was to be sent of a request cannot be: it ends with an error (HTTP 500), and others go on."""
        logger.error("request %r cannot be sent to an engine", request_id, exc_info=error)
        self._forget(request_id)
        end = EngineCoreOutput(request_id, [], finish_reason=FinishReason.ERROR)
        self.outputs_queue.put_nowait(EngineCoreOutputs(outputs=[end], finished_requests={request_id}))
        return self.controller.finished([request_id], time.monotonic(), aborted=True)

    def _to_leader(self, kind: EngineCoreRequestType, content: Any, group: Group) -> Awaitable[Any]:
        return self._send_input(kind, content, self.core_engines[group[0]])

    def _refuse(self, request_id: str, waited_s: float) -> None:
        self.streams.close(request_id)
        waiting = self._deadlines.pop(request_id, None)
        if waiting is not None and not waiting.done():
            message = f"the request waited {waited_s:.1f} s, longer than its queue_deadline_s"
            waiting.set_exception(GracefulHTTPError(message, HTTPStatus.GATEWAY_TIMEOUT))
