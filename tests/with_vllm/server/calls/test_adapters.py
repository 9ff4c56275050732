"""An adapter is on every engine or on none; an engine that is lost meanwhile does not count."""

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from vllm.lora.request import LoRARequest

from flying_serving.errors import AdapterNotLoaded, EngineLost
from flying_serving.server.calls import adapters
from flying_serving.server.calls.adapters import add_everywhere, read_files
from tests.with_vllm.server.doubles import Server

ADAPTER = LoRARequest(lora_name="a", lora_int_id=3, lora_path="/an/adapter")
OVERDUE = object()
"""In place of the answer of an engine that gives none."""
SHORT_S = 0.05
ENGINES = [0, 1, 2, 3]
REFUSED = ValueError("rank 16")


async def load(
    server: Server, *answers: Any, deadline_s: float | None = None
) -> asyncio.Task[bool]:
    """Load an adapter; engines answer in the order of their numbers. Returns the call, which may go
    on.
    """
    call = asyncio.ensure_future(add_everywhere(server.calls, ADAPTER, deadline_s))
    async with asyncio.timeout(5):  # its files are read in a thread before
        while len(server.told("add_lora")) < len(server.calls.engines):
            await asyncio.sleep(0.001)
    await answer(server, server.told("add_lora"), dict(zip(ENGINES, answers, strict=True)))
    return call


async def answer(server: Server, called: Sequence[int], answers: dict[int, Any]) -> None:
    """Engines answer the calls that wait, which are in the order of the engines `called`."""
    for send in server.vllm.sends:
        if not send.done():
            send.set_result(None)
    waiting = list(server.vllm.utility_results.values())
    for engine, future in zip(called, waiting, strict=True):
        given = answers.get(engine, True)
        if isinstance(given, Exception):
            future.set_exception(given)
        elif given is not OVERDUE:
            future.set_result(given)
    await _rounds()


async def _rounds() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def until_removing(server: Server) -> list[int]:
    """Wait until engines are told to remove the adapter. Returns them, in the order of the calls
    that wait.
    """
    async with asyncio.timeout(5):
        while len(server.told("remove_lora")) < len(server.calls.engines):
            await asyncio.sleep(0.01)
    return server.told("remove_lora")


async def test_an_adapter_is_loaded_on_every_engine() -> None:
    server = Server()
    call = await load(server, True, True, True, True)
    assert await call is True
    assert server.told("add_lora") == ENGINES
    assert server.told("remove_lora") == []


async def test_a_load_that_fails_on_one_engine_is_undone_on_all() -> None:
    server = Server()
    call = await load(server, True, True, REFUSED, True)
    assert server.told("remove_lora") == ENGINES
    assert not call.done()
    await answer(server, ENGINES, {})
    with pytest.raises(ValueError, match="rank 16"):
        await call


async def test_a_load_that_is_late_on_one_engine_is_undone_on_all() -> None:
    """The engine that may hang is told to remove the adapter, and is not waited for."""
    server = Server()
    call = await load(server, True, OVERDUE, True, True, deadline_s=SHORT_S)
    removing = await until_removing(server)
    assert sorted(removing) == ENGINES
    await answer(server, removing, {1: OVERDUE})
    with pytest.raises(
        AdapterNotLoaded, match=r"^engine 1 did not load adapter 'a' within 0\.05 s$"
    ):
        await call
    assert len(server.calls.tasks) == 1
    await answer(server, [1], {})
    assert not server.calls.tasks


async def test_an_engine_that_does_not_remove_an_adapter_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = Server()
    call = await load(server, True, True, REFUSED, True, deadline_s=SHORT_S)
    await answer(server, ENGINES, {0: RuntimeError("injected"), 1: OVERDUE, 3: EngineLost("ended")})
    with pytest.raises(ValueError, match="rank 16"):
        await call
    assert [record.getMessage() for record in caplog.records] == [
        "engine 0 may still have adapter 'a': injected",
        "engine 1 may still have adapter 'a': it did not remove the adapter within 0.05 s",
    ]


async def test_an_engine_that_is_lost_meanwhile_does_not_count() -> None:
    server = Server()
    call = await load(server, True, EngineLost("engine 1 has ended"), True, True)
    assert await call is True
    assert server.told("remove_lora") == []


async def test_a_load_that_no_engine_has_answered_fails() -> None:
    server = Server()
    call = await load(server, *[EngineLost(f"engine {engine} has ended") for engine in ENGINES])
    with pytest.raises(EngineLost, match="engine 0"):
        await call


async def test_a_load_without_engines_fails() -> None:
    server = Server()
    for engine in ENGINES:
        server.calls.cut_off(engine, f"engine {engine} has ended")
    with pytest.raises(EngineLost, match="no engine is present to load adapter 'a'"):
        await add_everywhere(server.calls, ADAPTER)


def test_files_of_an_adapter_are_read_whole(tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(bytes(2**24 + 1))
    (tmp_path / "folder").mkdir()
    assert read_files(str(tmp_path)) == 2**24 + 1
    assert read_files(str(tmp_path / "missing")) == 0


async def test_files_that_are_not_read_in_time_reach_no_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read = threading.Event()
    monkeypatch.setattr(adapters, "READ_DEADLINE_S", SHORT_S)
    monkeypatch.setattr(adapters, "read_files", lambda _: read.wait(5))
    server = Server()
    with pytest.raises(AdapterNotLoaded, match=r"adapter 'a' were not read within 0\.05 s$"):
        await add_everywhere(server.calls, ADAPTER)
    read.set()
    assert server.told("add_lora") == []
