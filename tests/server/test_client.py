"""The client as a shell: what the controller says is done before anything else can happen."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from vllm.exceptions import GracefulHTTPError
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, EngineCoreRequestType, FinishReason
from vllm.v1.engine.exceptions import EngineDeadError

from flying_serving.config import Deployment, FlyingConfig
from flying_serving.controller.commands import Command, Recall, Reject
from flying_serving.controller.controller import Controller
from flying_serving.layout.groups import Layout
from flying_serving.server.client import FlyingClient
from flying_serving.server.streams import Streams
from flying_serving.vllm_adapter.keys import HISTORY_KEY
from tests.controller.shell import settings

ADD, ABORT, UTILITY = EngineCoreRequestType.ADD, EngineCoreRequestType.ABORT, EngineCoreRequestType.UTILITY
APART, PAIRS = [[0], [1], [2], [3]], [[0, 1], [2, 3]]


class Engines:
    """In place of vLLM's resources: engines that live."""

    engine_dead = False


class Client(FlyingClient):
    """The production client whose messages are kept here; a send is over only when the test says so.

    `capped`: groups get no more prompts ahead than they can begin at once.
    """

    def __init__(self, *, capped: bool = True) -> None:
        self.deployment = Deployment(
            run_dir="", engines=4, devices=1, group_sizes=(1, 2, 4), flying=FlyingConfig(policy="manual")
        )
        chosen = settings("manual", capped=capped)
        self.controller = Controller(chosen)
        self.streams = Streams(chosen.capacity, 400)
        self._deadlines, self.tasks = {}, set()
        self.begin_orders()
        self.resources: Any = Engines()
        self.core_engines = [bytes([engine]) for engine in range(4)]
        self.client_index = 0
        self.utility_results = {}
        self.outputs_queue = asyncio.Queue()
        self.messages: list[tuple[EngineCoreRequestType, str, int]] = []
        self.sends: list[asyncio.Future[None]] = []
        self.histories: dict[str, list[int]] = {}
        self.unsendable: set[str] = set()
        self.gone = False

    def _send_input(self, request_type: EngineCoreRequestType, request: Any, engine: bytes | None = None) -> Any:
        what = {ADD: lambda: request.request_id, ABORT: lambda: request[0], UTILITY: lambda: request[2]}
        name = what[request_type]()
        if self.gone:
            raise EngineDeadError
        if request_type is not ABORT and name in self.unsendable:
            raise ValueError("planted")
        assert engine is not None
        self.messages.append((request_type, name, engine[0]))
        self.sends.append(asyncio.get_running_loop().create_future())
        if request_type is ADD:
            self.histories[request.request_id] = (request.sampling_params.extra_args or {}).get(HISTORY_KEY, [])
        return self.sends[-1]

    def _ensure_output_queue_task(self) -> None:
        pass

    def open_request(self, request_id: str, output_tokens: int = 20, prompt_tokens: int = 10) -> None:
        """A request comes."""
        self.carry_out(self.arrived(request_id, output_tokens, prompt_tokens))

    def arrived(self, request_id: str, output_tokens: int = 20, prompt_tokens: int = 10) -> list[Command]:
        """The same. Returns what the controller says, which is still to be carried out."""
        params = SamplingParams(max_tokens=output_tokens)
        request = EngineCoreRequest(request_id, list(range(prompt_tokens)), None, params, None, 0.0, None, None, None)
        wanted = self.streams.wanted(prompt_tokens, params, request.priority)
        self.streams.open(request)
        return self.controller.arrived(request_id, wanted, 0.0)

    async def outputs(self, engine_id: str, tokens: list[int], *, over: bool = False) -> list[str]:
        """An engine gives tokens. Returns the ids of the requests that vLLM hears of."""
        reason = FinishReason.LENGTH if over else None
        outputs = EngineCoreOutputs(outputs=[EngineCoreOutput(engine_id, tokens, finish_reason=reason)])
        processing = asyncio.get_running_loop().create_task(self.process_engine_outputs(outputs))
        await asyncio.sleep(0)
        self.sent()
        await asyncio.wait_for(processing, 5)
        return [output.request_id for output in outputs.outputs]

    def sent(self) -> None:
        """All messages are on their way, and engines answer what they were asked."""
        for send in self.sends:
            if not send.done():
                send.set_result(None)
        for answer in self.utility_results.values():
            if not answer.done():
                answer.set_result({"in_flight_ms": 1.0, "overhead_ms": 0.1, "work_ms": 0.1})


async def switch(client: Client, groups: list[list[int]], mode: str) -> asyncio.Task[Any]:
    """Begin a switch; no message of it has left when this returns."""
    task = asyncio.get_running_loop().create_task(client.switch(groups, mode))
    await asyncio.sleep(0)
    return task


def test_what_moves_does_so_with_what_it_got_until_the_engines_answered() -> None:
    """Then at once, and all engines are told that they may go on behind it."""

    async def run() -> None:
        client = Client()
        client.open_request("a")
        assert client.messages == [(ADD, "a", 0)]
        assert await client.outputs("a", [7]) == ["a"]
        client.messages.clear()
        task = await switch(client, PAIRS, "migrate")
        assert client.messages == [(UTILITY, "flying_switch", engine) for engine in range(4)]
        client.messages.clear()
        assert await client.outputs("a", [8]) == ["a"]
        await asyncio.wait_for(task, 5)
        assert client.messages[:4] == [(UTILITY, "flying_announce_migrations", engine) for engine in range(4)]
        assert client.messages[4] == (ABORT, "a", 0)
        assert client.messages[5:] in ([(ADD, "a+1", 0)], [(ADD, "a+1", 2)])
        assert client.histories["a+1"] == [7, 8]
        assert await client.outputs("a", [9], over=True) == []
        assert await client.outputs("a+1", [9], over=True) == ["a"]
        assert client.controller.running == 0

    asyncio.run(run())


def test_the_end_of_another_request_during_a_switch_moves_none_twice() -> None:
    """Groups have fewer slots than engines: some of what is withdrawn waits, and goes on as others end."""

    async def run() -> None:
        client = Client()
        names = [f"r{number}" for number in range(16)]
        for name in names:
            client.open_request(name)
        task = await switch(client, PAIRS, "migrate")
        left = {name: client.streams.engine_id(name) for name in names}
        assert await client.outputs(left["r0"], [1], over=True) in ([], ["r0"])
        for name in names:
            for _ in range(3):  # it may move, or begin, as others end
                if client.controller.group_of(name) is not None:
                    await client.outputs(client.streams.engine_id(name), [1], over=True)
        await asyncio.wait_for(task, 5)
        assert client.controller.running == 0
        assert not len(client.controller.pool)
        where: dict[str, int] = {}
        for kind, what, engine in client.messages:
            if kind is ADD:
                assert what not in where
                where[what] = engine
            if kind is ABORT:
                assert where[what] == engine

    asyncio.run(run())


def test_a_client_that_leaves_takes_nothing_of_others_back() -> None:
    async def run() -> None:
        client = Client()
        client.open_request("a")
        aborting = asyncio.get_running_loop().create_task(client.abort_requests_async(["a"]))
        await asyncio.sleep(0)
        client.open_request("b")
        waiting = asyncio.ensure_future(client.carry_out([]))
        aborting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await aborting
        await asyncio.wait_for(waiting, 5)
        assert client.messages == [(ADD, "a", 0), (ABORT, "a", 0), (ADD, "b", 0)]
        assert client.controller.running == 1

    asyncio.run(run())


def test_a_request_that_cannot_be_sent_ends_alone() -> None:
    """All that wait are dispatched by one event, the end of another: its outputs and those behind it come through."""

    async def run() -> None:
        client = Client()
        names = [f"r{number}" for number in range(8)]
        client.open_request("first")
        task = await switch(client, PAIRS, "sequential")
        for name in names:
            client.open_request(name)
        assert client.messages == [(ADD, "first", 0)]
        client.unsendable = {"r0", "r5"}
        assert await client.outputs("first", [1], over=True) == ["first"]
        await asyncio.wait_for(task, 5)
        begun = [what for kind, what, _ in client.messages if kind is ADD]
        assert begun == ["first", "r1", "r2", "r3", "r4", "r6", "r7"]
        ended = [await asyncio.wait_for(client.get_output_async(), 5) for _ in client.unsendable]
        assert {(o.request_id, o.finish_reason) for one in ended for o in one.outputs} == {
            ("r0", FinishReason.ERROR),
            ("r5", FinishReason.ERROR),
        }
        assert client.controller.running == 6
        assert not len(client.controller.pool)

    asyncio.run(run())


def test_a_request_that_fails_keeps_no_other_command_from_being_carried_out() -> None:
    """Begun, an order, begun anew in its layout, as the controller may say in one breath: it ends, others move."""

    async def run() -> None:
        client = Client(capped=False)
        commands = [command for number in range(8) for command in client.arrived(f"r{number}", prompt_tokens=70)]
        made, ordered = client.controller.order(Layout.parse(PAIRS, 4, (1, 2, 4)), "weave", None, 0.0)
        moved = [command.request_id for command in ordered if isinstance(command, Recall)]
        assert len(moved) == 4
        client.unsendable = {moved[0]}
        client.carry_out(commands + ordered)
        assert [what for _, what, _ in client.messages].count("flying_switch") == 4
        assert [what for kind, what, _ in client.messages if kind is ABORT] == moved[1:]
        for name in moved[1:]:
            assert client.streams.engine_id(name) == f"{name}+1"
        ended = await asyncio.wait_for(client.get_output_async(), 5)
        assert [(o.request_id, o.finish_reason) for o in ended.outputs] == [(moved[0], FinishReason.ERROR)]
        assert client.outputs_queue.empty()
        assert client.controller.running == 7
        for _ in range(3):
            await asyncio.sleep(0.01)
            client.sent()
        assert made.problem is None
        assert not client.controller.changing

    asyncio.run(run())


def test_an_order_that_cannot_be_sent_fails_alone() -> None:
    """Who ordered it hears why; what was said with it is done, and the next order begins."""

    async def run() -> None:
        client = Client(capped=False)
        for number in range(8):
            client.open_request(f"r{number}", prompt_tokens=70)
        client.unsendable = {"flying_switch"}
        ordering = await switch(client, PAIRS, "weave")
        client.sent()
        with pytest.raises(ValueError, match="planted"):
            await asyncio.wait_for(ordering, 5)
        assert client.controller.switches.kept[-1].problem == "planted"
        assert [kind for kind, _, _ in client.messages].count(ABORT) == 4
        client.unsendable = set()
        task = await switch(client, APART, "weave")
        await asyncio.sleep(0)
        client.sent()
        assert (await asyncio.wait_for(task, 5)).problem is None

    asyncio.run(run())


def test_engines_that_are_gone_keep_no_command_from_being_carried_out() -> None:
    """That needs none of them; who gave the commands hears of it then."""

    async def run() -> None:
        client = Client()
        commands = client.arrived("a")
        expires = client._deadlines["late"] = asyncio.get_running_loop().create_future()
        client.gone = True
        with pytest.raises(EngineDeadError):
            client.carry_out([*commands, Reject("late", 1.0)])
        with pytest.raises(GracefulHTTPError, match="longer than its queue_deadline_s"):
            await asyncio.wait_for(expires, 5)

    asyncio.run(run())


def test_a_call_is_on_its_way_before_it_is_awaited() -> None:
    async def run() -> None:
        client = Client()
        call = client.utility(2, "flying_report")
        assert client.messages == [(UTILITY, "flying_report", 2)]
        client.sent()
        assert (await call)["work_ms"] == 0.1

    asyncio.run(run())


def test_what_a_task_raises_ends_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock or a switch that died unheard would leave requests waiting: who reads vLLM's outputs hears of it."""

    async def run() -> None:
        client = Client()

        def fail(*_: Any) -> None:
            raise ValueError("planted")

        monkeypatch.setattr(client.controller, "acknowledged", fail)
        task = await switch(client, PAIRS, "weave")
        client.sent()
        with pytest.raises(ValueError, match="planted"):
            await asyncio.wait_for(client.get_output_async(), 5)
        assert not client.tasks
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
