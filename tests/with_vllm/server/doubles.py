"""The server's shell over a vLLM client without engines, which keeps messages until a test sends
them.
"""

import asyncio
import time
from collections.abc import Callable
from copy import copy
from types import SimpleNamespace
from typing import Any

from vllm.config import ModelConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineCoreRequestType,
    FinishReason,
)
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.serial_utils import MsgpackEncoder

from flying_serving.config import Deployment, FlyingConfig
from flying_serving.controller.commands import Command
from flying_serving.predict.migrations import MigrationCost
from flying_serving.server.calls.engine_calls import EngineCalls
from flying_serving.server.client import until_the_end
from flying_serving.server.shell import Shell
from flying_serving.vllm_adapter.api_server.client_channel import ClientChannel
from flying_serving.vllm_adapter.keys import HISTORY_KEY
from tests.unit.controller.model_settings import settings
from tests.unit.policy.costs import costs, measured
from tests.with_vllm.vllm_adapter.kv_lanes import config

ADD, ABORT, UTILITY = (
    EngineCoreRequestType.ADD,
    EngineCoreRequestType.ABORT,
    EngineCoreRequestType.UTILITY,
)
APART, PAIRS, ALL = [[0], [1], [2], [3]], [[0, 1], [2, 3]], [[0, 1, 2, 3]]
ANSWERS: dict[str, Any] = {
    "flying_switch": {"in_flight_ms": 1.0, "overhead_ms": 0.1, "work_ms": 0.1},
    "flying_report": {
        "engine": 0,
        "pid": 1,
        "lanes": {},
        "blocks": 9,
        "free_blocks": 9,
        "lent_blocks": {},
        "steps": {},
        "migrations": {"migrated": 0, "migrated_tokens": 0, "prefilled_again": 0},
    },
    "flying_steps": [],
    "flying_calibration": [],
    "flying_migration_costs": [],
}


class FakeVllm:
    """What the channel uses of vLLM's client."""

    def __init__(self) -> None:
        self.core_engines = [engine.to_bytes(2, "little") for engine in range(4)]
        self.core_engine = self.core_engines[0]
        self.client_index = 0
        self.encoder = MsgpackEncoder()
        self.outputs_queue: asyncio.Queue[Any] = asyncio.Queue()
        self.resources = SimpleNamespace(engine_dead=False, output_queue_task=None)
        self.utility_results: dict[int, asyncio.Future[Any]] = {}
        self.methods: dict[int, str] = {}
        self.messages: list[tuple[EngineCoreRequestType, str, int]] = []
        self.sends: list[asyncio.Future[None]] = []
        self.histories: dict[str, list[int]] = {}
        self.extras: dict[str, dict[str, Any]] = {}
        self.retained: list[tuple[int, Any]] = []
        self.unsendable: set[str] = set()

    def ensure_alive(self) -> None:
        if self.resources.engine_dead:
            raise EngineDeadError

    def _send_input(
        self, kind: EngineCoreRequestType, content: Any, engine: bytes
    ) -> asyncio.Future[None]:
        self.ensure_alive()
        what = {
            ADD: lambda: content.request_id,
            ABORT: lambda: content[0],
            UTILITY: lambda: content[2],
        }
        name = what[kind]()
        if kind is not ABORT and name in self.unsendable:
            raise ValueError("injected")
        self.messages.append((kind, name, engine[0]))
        self.sends.append(asyncio.get_running_loop().create_future())
        if kind is ADD:
            self.extras[content.request_id] = content.sampling_params.extra_args or {}
            self.histories[content.request_id] = self.extras[content.request_id].get(
                HISTORY_KEY, []
            )
        if kind is UTILITY:
            self.methods[content[1]] = name
            if name == "flying_retain":
                self.retained.append((engine[0], content[3][0]))
        return self.sends[-1]

    def _ensure_output_queue_task(self) -> None:
        pass

    async def get_output_async(self) -> Any:
        output = await self.outputs_queue.get()
        if isinstance(output, Exception):
            raise output
        return output


class Server:
    """A shell with four engines, and the vLLM client under it.

    Args:
        policy: of the server.
        capped: groups get no more prompts ahead than they can begin at once.
        most_waiting: requests.
        vllm: whose messages are kept.
        clock: of the shell.
    """

    def __init__(
        self,
        *,
        policy: str = "manual",
        capped: bool = True,
        most_waiting: int = 1000,
        vllm: FakeVllm | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        deployment = Deployment(
            run_dir="",
            engines=4,
            devices=1,
            group_sizes=(1, 2, 4),
            flying=FlyingConfig(policy=policy),
        )
        self.vllm = vllm or FakeVllm()
        self.calls = EngineCalls(ClientChannel(self.vllm), deployment)
        self.shell = Shell(
            self.calls,
            settings(policy, capped=capped, most_waiting=most_waiting),
            model_config(),
            clock,
        )
        self.controller, self.streams, self.orders = (
            self.shell.controller,
            self.shell.streams,
            self.shell.orders,
        )
        self.messages = self.vllm.messages

    def open_request(
        self, request_id: str, output_tokens: int = 20, prompt_tokens: int = 10, **extra: Any
    ) -> None:
        """A request arrives, and is sent or waits."""
        self.shell.carry_out(self.arrived(request_id, output_tokens, prompt_tokens, **extra))

    def arrived(
        self, request_id: str, output_tokens: int = 20, prompt_tokens: int = 10, **extra: Any
    ) -> list[Command]:
        """A request arrives. Returns the controller's commands, which are not carried out."""
        new = request(request_id, output_tokens, prompt_tokens, **extra)
        spec = self.streams.spec_of(prompt_tokens, new.sampling_params, new.priority)
        self.streams.open(new)
        return self.controller.arrived(request_id, spec, 0.0)

    def processed(self, *request_ids: str) -> list[RequestOutputCollector]:
        """vLLM's output processor has begun to process requests. Returns where it puts what their
        clients get.
        """
        if self.calls.channel.outputs is None:
            self.calls.channel.outputs = OutputProcessor(None, log_stats=False)
        queues = []
        for request_id in request_ids:
            known = request(request_id)
            known.external_req_id = request_id
            queues.append(RequestOutputCollector(known.sampling_params.output_kind, request_id))
            self.calls.channel.outputs.add_request(known, None, queue=queues[-1])
        return queues

    def told(self, method: str = "flying_switch") -> list[int]:
        """The engines of which a utility was called."""
        return [engine for kind, what, engine in self.messages if (kind, what) == (UTILITY, method)]

    async def switch(
        self, groups: list[list[int]], mode: str, rounds: int = 0
    ) -> asyncio.Task[Any]:
        """Order a switch. Messages are sent and answered `rounds` times."""
        task = asyncio.get_running_loop().create_task(self.orders.switch(groups, mode))
        await asyncio.sleep(0)
        for _ in range(rounds):
            self.sent()
            await asyncio.sleep(0)
        return task

    def measured(self) -> None:
        """Engines have told what steps and migrations cost."""
        self.controller.state.migrates = {2: MigrationCost(0.002, 1e-5)}
        self.controller.state.steps.calibrate(measured(costs((1, 2, 4))))

    async def outputs(
        self,
        engine_id: str,
        tokens: list[int],
        *,
        over: bool = False,
        reason: FinishReason | None = None,
    ) -> list[str]:
        """An engine gives tokens. Returns the ids of the requests that vLLM hears of."""
        reason = FinishReason.LENGTH if over else reason
        outputs = EngineCoreOutputs(
            outputs=[EngineCoreOutput(engine_id, tokens, finish_reason=reason)]
        )
        processing = asyncio.get_running_loop().create_task(self.shell.take_outputs(outputs))
        await asyncio.sleep(0)
        self.sent()
        await asyncio.wait_for(processing, 5)
        return [output.request_id for output in outputs.outputs]

    async def read(self) -> Any:
        """The next outputs that vLLM reads."""
        return await asyncio.wait_for(until_the_end(self.calls, self.vllm.get_output_async()), 5)

    def sent(self) -> None:
        """All messages are on their way, and engines answer the calls."""
        for send in self.vllm.sends:
            if not send.done():
                send.set_result(None)
        for call_id, answer in self.vllm.utility_results.items():
            if not answer.done():
                answer.set_result(ANSWERS.get(self.vllm.methods[call_id]))

    async def settle(self, rounds: int = 10) -> None:
        """Messages are sent and answered, some times in a row."""
        for _ in range(rounds):
            self.sent()
            await asyncio.sleep(0.01)


def model_config() -> ModelConfig:
    """Return vLLM's configuration of a tiny model."""
    made = copy(config().model_config)
    made.max_model_len, made.served_model_name = 400, "tiny"
    return made


def request(
    request_id: str, output_tokens: int = 20, prompt_tokens: int = 10, **extra: Any
) -> EngineCoreRequest:
    """Return a request as vLLM's server hands it over."""
    params = SamplingParams(max_tokens=output_tokens, extra_args=extra or None)
    return EngineCoreRequest(
        request_id, list(range(prompt_tokens)), None, params, None, 0.0, None, None, None
    )
