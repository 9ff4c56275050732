"""An adapter is on every engine or on none; an engine that is lost meanwhile does not count."""

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm.config.lora import LoRAConfig
from vllm.lora.request import LoRARequest

from flying_lab.tiny_models.adapters import make_adapter
from flying_serving.errors import AdapterNotLoaded, EngineLost
from flying_serving.server.calls import adapters
from flying_serving.server.calls.adapters import AdapterLoads
from flying_serving.server.engine_record import EnginePhase
from flying_serving.server.own_thread import in_own_thread
from flying_serving.vllm_adapter.lora.files import WEIGHT_FILES, copied
from flying_serving.vllm_adapter.lora.notes import AdapterNotes
from tests.with_vllm.server import doubles

OVERDUE = object()
"""In place of the answer of an engine that gives none."""
SHORT_S = 0.05
ENGINES = [0, 1, 2, 3]
REFUSED = ValueError("rank 16")
FLOAT32 = torch.float32


class AdapterServer(doubles.Server):
    """A server with a run directory, and an adapter in a folder beside it."""

    def __init__(self, tmp_path: Path) -> None:
        super().__init__()
        self.run_dir = tmp_path / "run"
        self.run_dir.mkdir()
        changes = {"run_dir": str(self.run_dir)}
        self.calls.deployment = self.calls.deployment.model_copy(update=changes)
        self.folder = make_adapter(tmp_path / "adapter", "llama", seed=1)
        self.adapter = LoRARequest("a", 3, str(self.folder))
        self.loads = AdapterLoads(self.calls, LoRAConfig(lora_dtype=FLOAT32))


@pytest.fixture
def server(tmp_path: Path) -> AdapterServer:
    return AdapterServer(tmp_path)


async def load(
    server: AdapterServer, *answers: Any, deadline_s: float | None = None
) -> asyncio.Task[bool]:
    """Load an adapter; engines answer in the order of their numbers. Returns the call, which may go
    on.
    """
    call = asyncio.ensure_future(server.loads.add_everywhere(server.adapter, deadline_s))
    async with asyncio.timeout(5):  # its files are read in a thread before
        while len(server.told("add_lora")) < len(server.calls.engines):
            await asyncio.sleep(0.001)
    await answer(server, server.told("add_lora"), dict(zip(ENGINES, answers, strict=True)))
    return call


async def answer(server: AdapterServer, called: Sequence[int], answers: dict[int, Any]) -> None:
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


async def until_removing(server: AdapterServer) -> list[int]:
    """Wait until engines are told to remove the adapter. Returns them, in the order of the calls
    that wait.
    """
    async with asyncio.timeout(5):
        while len(server.told("remove_lora")) < len(server.calls.engines):
            await asyncio.sleep(0.01)
    return server.told("remove_lora")


async def test_an_adapter_is_loaded_on_every_engine(server: AdapterServer) -> None:
    call = await load(server, True, True, True, True)
    assert await call is True
    assert server.told("add_lora") == ENGINES
    assert server.told("remove_lora") == []


async def test_a_load_that_fails_on_one_engine_is_undone_on_all(server: AdapterServer) -> None:
    call = await load(server, True, True, REFUSED, True)
    assert server.told("remove_lora") == ENGINES
    assert not call.done()
    await answer(server, ENGINES, {})
    with pytest.raises(ValueError, match="rank 16"):
        await call


async def test_a_load_that_is_late_on_one_engine_is_undone_on_all(server: AdapterServer) -> None:
    """The engine that may hang is told to remove the adapter, and is not waited for."""
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
    server: AdapterServer, caplog: pytest.LogCaptureFixture
) -> None:
    call = await load(server, True, True, REFUSED, True, deadline_s=SHORT_S)
    await answer(server, ENGINES, {0: RuntimeError("injected"), 1: OVERDUE, 3: EngineLost("ended")})
    with pytest.raises(ValueError, match="rank 16"):
        await call
    assert [record.getMessage() for record in caplog.records] == [
        "engine 0 may still have adapter 'a': injected",
        "engine 1 may still have adapter 'a': it did not remove the adapter within 0.05 s",
    ]


async def test_an_engine_that_is_lost_meanwhile_does_not_count(server: AdapterServer) -> None:
    call = await load(server, True, EngineLost("engine 1 has ended"), True, True)
    assert await call is True
    assert server.told("remove_lora") == []


async def test_a_load_that_no_engine_has_answered_fails(server: AdapterServer) -> None:
    call = await load(server, *[EngineLost(f"engine {engine} has ended") for engine in ENGINES])
    with pytest.raises(EngineLost, match="engine 0"):
        await call


async def test_a_load_without_engines_fails(server: AdapterServer) -> None:
    for engine in ENGINES:
        server.calls.records[engine].enter(EnginePhase.LOST)
    with pytest.raises(EngineLost, match="no engine is present to load adapter 'a'"):
        await server.loads.add_everywhere(server.adapter)


# ---- its files, which are read before


async def test_engines_are_told_which_files_count(server: AdapterServer) -> None:
    call = await load(server, True, True, True, True)
    assert await call is True
    with copied(server.adapter, str(server.run_dir)) as files:
        assert AdapterNotes(str(server.run_dir)).agree(3, "another") == files.digest


async def test_a_number_that_is_not_finite_reaches_no_engine(server: AdapterServer) -> None:
    path = server.folder / WEIGHT_FILES[0]
    tensors = load_file(path)
    name = sorted(tensors)[0]
    tensors[name] = tensors[name].clone().fill_(float("nan"))
    save_file(tensors, path)
    with pytest.raises(AdapterNotLoaded, match=f"^adapter 'a': {path.name}: {name} has nan: must"):
        await server.loads.add_everywhere(server.adapter)
    assert server.told("add_lora") == []


async def test_files_that_are_not_read_in_time_reach_no_engine(
    server: AdapterServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the read stops at its next piece."""
    read, stopped = threading.Event(), list[bool]()

    def reading(*_: Any) -> str:
        read.wait(5)
        stopped.append(_[-1]())
        return "a digest"

    monkeypatch.setattr(adapters, "READ_DEADLINE_S", SHORT_S)
    monkeypatch.setattr(adapters, "read_files", reading)
    with pytest.raises(AdapterNotLoaded, match=r"adapter 'a' were not read within 0\.05 s$"):
        await server.loads.add_everywhere(server.adapter)
    read.set()
    async with asyncio.timeout(5):
        while not stopped:
            await asyncio.sleep(0.001)
    assert stopped == [True]
    assert server.told("add_lora") == []


async def test_folders_that_hang_take_no_thread_of_others(
    server: AdapterServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Starts of engines and the loop's executor go on, however often a client tries again."""
    read = threading.Event()

    def reading(*_: Any) -> str:
        read.wait(30)
        return "a digest"

    monkeypatch.setattr(adapters, "READ_DEADLINE_S", SHORT_S)
    monkeypatch.setattr(adapters, "read_files", reading)
    for _ in range(40):
        with pytest.raises(AdapterNotLoaded):
            await server.loads.add_everywhere(server.adapter)
    threads = [thread.name for thread in threading.enumerate()]
    assert threads.count("flying-read") == adapters.READERS
    async with asyncio.timeout(5):
        assert await in_own_thread(lambda: 7, "flying-start-0") == 7
        assert await asyncio.to_thread(lambda: 8) == 8
    read.set()


async def test_a_read_has_its_place_again_when_it_has_ended(
    server: AdapterServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any) -> str:
        raise OSError("injected")

    monkeypatch.setattr(adapters, "read_files", failing)
    for _ in range(2 * adapters.READERS):
        with pytest.raises(OSError, match="injected"):
            await server.loads.add_everywhere(server.adapter)
    monkeypatch.setattr(adapters, "read_files", lambda *_: "a digest")
    call = await load(server, True, True, True, True)
    assert await call is True
