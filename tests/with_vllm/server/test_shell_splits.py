"""Split requests in the shell: what engines are sent at each event, and what their clients see of
it: nothing.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from vllm.v1.engine import FinishReason

from flying_serving.controller import splitter
from flying_serving.policy.split import Plan
from flying_serving.predict.migrations import MigrationCost
from flying_serving.vllm_adapter.keys import AHEAD_KEY, MIGRATED_FROM_KEY, OFFER_KEY
from tests.with_vllm.server.doubles import ABORT, ADD, PAIRS, UTILITY, Server

IN_PROMPT, IN_OUTPUT = 4, 12
"""Of ten prompt tokens."""


def split(at: int) -> Server:
    """A server with a request that is split there; its messages are forgotten."""
    server = Server()
    server.measured()
    server.open_request("a", split_at=at)
    assert {what for _, what, _ in server.messages} == {"a", "a~1"}
    return server


def notes(server: Server, engine_id: str) -> dict[str, Any]:
    """What engines were told of a request, without the client's own."""
    return {key: value for key, value in server.vllm.extras[engine_id].items() if key != "split_at"}


async def test_a_split_inside_the_prompt() -> None:
    """The prefix's output is not shown; the request runs where it was sent at once."""
    server = split(IN_PROMPT)
    assert server.messages == [(ADD, "a~1", 0), (ADD, "a", 1)]
    assert notes(server, "a~1") == {OFFER_KEY: (1, True)}
    assert notes(server, "a") == {MIGRATED_FROM_KEY: (0, 1, 1)}
    assert await server.outputs("a~1", [9], over=True) == []
    assert len(server.controller.state.splits) == 0
    assert await server.outputs("a", [7]) == ["a"]
    assert await server.outputs("a", [8], over=True) == ["a"]
    assert server.messages == [(ADD, "a~1", 0), (ADD, "a", 1)]
    assert server.controller.state.running == 0


async def test_a_split_in_the_output() -> None:
    """The first group ends it there, which its client does not see, and the second goes on under
    the id it knows.
    """
    server = split(IN_OUTPUT)
    assert server.messages == [(ADD, "a", 0), (ADD, "a~1", 1)]
    assert notes(server, "a") == {OFFER_KEY: (1, True)}
    assert notes(server, "a~1") == {MIGRATED_FROM_KEY: (0, 1, 1), AHEAD_KEY: IN_OUTPUT}
    assert await server.outputs("a", [5, 6]) == ["a"]
    server.messages.clear()
    assert await server.outputs("a", [7], over=True) == ["a"]
    assert server.messages == [(ADD, "a~1", 1)]
    assert server.vllm.histories["a~1"] == [5, 6, 7]
    assert notes(server, "a~1").keys() == {MIGRATED_FROM_KEY, "flying_history"}
    assert server.controller.state.running == 1
    assert await server.outputs("a~1", [8], over=True) == ["a"]
    assert server.controller.state.running == 0
    assert server.messages == [(ADD, "a~1", 1)]


async def test_a_stop_before_the_split_ends_the_pull() -> None:
    server = split(IN_OUTPUT)
    server.messages.clear()
    assert await server.outputs("a", [5], reason=FinishReason.STOP) == ["a"]
    assert server.messages == [(ABORT, "a~1", 1)]
    assert server.controller.state.running == 0


@pytest.mark.parametrize(("at", "where"), [(IN_PROMPT, 1), (IN_OUTPUT, 0)])
async def test_a_client_that_leaves_ends_both_parts(at: int, where: int) -> None:
    server = split(at)
    server.messages.clear()
    aborting = asyncio.get_running_loop().create_task(server.shell.abort(["a"]))
    await asyncio.sleep(0)
    server.sent()
    await asyncio.wait_for(aborting, 5)
    assert server.messages == [(ABORT, "a", where), (ABORT, "a~1", 1 - where)]
    assert await server.outputs("a~1", [9], over=True) == []
    assert len(server.controller.state.splits) == server.controller.state.running == 0


async def test_an_order_undoes_a_split_inside_the_prompt() -> None:
    """Its first group offers what it has by then; all that leave a leader are named in one
    message.
    """
    server = split(IN_PROMPT)
    server.messages.clear()
    task = await server.switch(PAIRS, "weave", rounds=5)
    await asyncio.wait_for(task, 5)
    assert server.messages[0] == (UTILITY, "flying_retain", 0)
    assert server.vllm.retained[0] == (0, [("a~1", 1)])
    assert await server.outputs("a~1", [9], over=True) == []
    assert server.controller.state.splits.counts.undone == 1


async def test_an_order_undoes_a_split_in_the_output() -> None:
    """The request ends at its split as if its group was full, and goes on with its KV."""
    server = split(IN_OUTPUT)
    server.messages.clear()
    task = await server.switch(PAIRS, "weave", rounds=5)
    await asyncio.wait_for(task, 5)
    assert server.messages[0] == (ABORT, "a~1", 1)
    server.messages.clear()
    assert await server.outputs("a", [5, 6, 7], over=True) == ["a"]
    ((kind, what, _),) = server.messages
    assert kind == ADD
    assert what == "a+1"
    assert notes(server, "a+1")[MIGRATED_FROM_KEY] == (0, 1, 1)
    assert server.vllm.histories["a+1"] == [5, 6, 7]


async def test_a_prefix_that_its_group_fails_is_not_waited_for() -> None:
    server = split(IN_PROMPT)
    server.messages.clear()
    assert await server.outputs("a~1", [], reason=FinishReason.ERROR) == []
    assert server.messages == [(UTILITY, "flying_retain", 0)]
    assert server.vllm.retained == [(0, [("a~1", 1)])]
    assert await server.outputs("a", [7], over=True) == ["a"]


@pytest.mark.parametrize("at", [IN_PROMPT, IN_OUTPUT])
async def test_a_part_that_cannot_be_sent_leaves_an_ordinary_request(at: int) -> None:
    server = Server()
    server.measured()
    server.vllm.unsendable = {"a~1"}
    server.open_request("a", split_at=at)
    ended = (UTILITY, "flying_retain", 0) if at == IN_PROMPT else (ABORT, "a~1", 1)
    assert server.messages == [(ADD, "a", 1 if at == IN_PROMPT else 0), ended]
    assert await server.outputs("a", [7]) == ["a"]
    assert server.controller.state.running == 1
    assert len(server.controller.state.splits) == 0


@pytest.mark.parametrize("at", [IN_PROMPT, IN_OUTPUT])
async def test_a_split_request_that_cannot_be_sent_ends_with_its_part(at: int) -> None:
    server = Server()
    server.measured()
    server.vllm.unsendable = {"a"}
    server.open_request("a", split_at=at)
    assert [kind for kind, what, _ in server.messages if what == "a~1"] in ([ADD, ABORT], [ABORT])
    ended = await server.read()
    assert [(one.request_id, one.finish_reason) for one in ended.outputs] == [
        ("a", FinishReason.ERROR)
    ]
    assert server.controller.state.running == len(server.controller.state.splits) == 0


async def test_a_request_that_gets_longer_than_planned_moves_with_its_kv(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its group retains its KV, and an idle engine pulls it; the client does not notice."""
    monkeypatch.setattr(splitter, "plan", lambda *_: Plan(1000, 1.0, 1.0, 3))
    server = Server(policy="split")
    server.measured()
    server.controller.state.migrates = {2: MigrationCost(1e-5, 1e-7)}
    for name in "abcde":
        server.open_request(name, 60, expected_tokens=1)
        await server.outputs(name, [5])
    assert server.controller.state.group_of("a") == server.controller.state.group_of("e") == (0,)
    for name in "bcd":
        await server.outputs(name, [6], reason=FinishReason.STOP)
    assert await server.outputs("a", [7] * 21) == ["a"]
    server.messages.clear()
    server.shell.carry_out(server.controller.tick(1.0))
    assert server.messages == [(UTILITY, "flying_retain", 0), (ADD, "a+1", 1)]
    ((leader, ((engine_id, number),)),) = server.vllm.retained
    assert (leader, engine_id) == (0, "a")
    assert notes(server, "a+1")[MIGRATED_FROM_KEY] == (0, 1, number)
    assert server.vllm.histories["a+1"] == [5, *[7] * 21]
    assert await server.outputs("a", [8]) == []
    assert await server.outputs("a+1", [8]) == ["a"]
