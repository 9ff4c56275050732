"""How a server ends: by a signal, by the death of an engine, by a flag that it cannot serve. Never
with a rest.
"""

import asyncio
import os
import re
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from flying_serving.server.start.rundir import _remove_left
from harness.forked import by_shell, run
from harness.live import COMMAND, Server, tiny, wait_until
from harness.streams import Stream, begin, stream, streamed_body
from tests.deep.server.lifetimes import (
    SHARED_MEMORY,
    START_S,
    Parts,
    bodies,
    wait_until_logged,
    wait_until_nothing_is_left,
)

pytestmark = pytest.mark.server

TWO_DEVICES = pytest.mark.cpu_only("an engine of two devices needs two GPUs")
GLOO = pytest.mark.cpu_only("gloo is for CPUs")
TERM_S, DEATH_S, DRAIN_S = 60.0, 60.0, 120.0


def two_engines(*flags: str) -> Server:
    """Started as a user would."""
    return Server("llama", 2, *flags, program=COMMAND)


@pytest.fixture
def server() -> Iterator[Server]:
    with Server("llama", 2) as live:
        yield live


async def streams_until(
    server: Server,
    signal_to: psutil.Process,
    number: signal.Signals,
    first: Callable[[], None] = lambda: None,
) -> None:
    """Stream in both lanes, send the signal once all stream, and wait until every stream is over,
    one way or other.
    """
    async with httpx.AsyncClient(base_url=server.url, timeout=DEATH_S) as http:
        streams, tasks = await begin(http, bodies(server, 4, 2000, (1, 2)), tokens=6)
        first()
        await asyncio.sleep(0.05)
        signal_to.send_signal(number)
        results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), DEATH_S)
    assert not any(isinstance(result, httpx.TimeoutException) for result in results)
    assert not any(into.finish_reason == "length" for into in streams)


def assert_quiet(log: str) -> None:
    """A server that ends because it was told to has nothing to complain of."""
    assert not re.findall(
        r".*(?:Traceback|ERROR|never retrieved|never awaited|Exception ignored).*", log
    ), log


def test_sigterm_ends_server_engines_and_streams() -> None:
    """Quietly; streams end with an error, and a change of layout that waits for them is
    answered.
    """
    with two_engines() as server:
        parts = Parts.of(server)
        before = len(server.log())
        orders: list[httpx.Response] = []

        def order() -> None:
            body = {"groups": [[0, 1]], "mode": "sequential"}
            orders.append(httpx.post(f"{server.url}/flying/layout", json=body, timeout=DEATH_S))

        ordering = threading.Thread(target=order)

        def ordered() -> None:
            ordering.start()
            wait_until(lambda: server.http.get("/flying/view").json()["changing"])

        asyncio.run(streams_until(server, parts.others[0], signal.SIGTERM, first=ordered))
        ordering.join(DEATH_S)
        wait_until_nothing_is_left(server, parts, TERM_S)
        assert server.process.returncode == 0
        assert [(answer.status_code, answer.json()["error"]["message"]) for answer in orders] == [
            (503, "the server is shutting down")
        ]
        assert_quiet(server.log()[before:])


async def until_told_to_end(http: httpx.AsyncClient) -> None:
    """Wait until the server has noticed a signal: from then on it takes no requests."""
    async with asyncio.timeout(DEATH_S):
        while (await http.get("/ready")).status_code != httpx.codes.SERVICE_UNAVAILABLE:
            await asyncio.sleep(0.02)


async def stream_while_it_ends(server: Server, count: int, max_tokens: int) -> list[Stream]:
    """Stream, signal all of its processes once it has all requests, and wait for the ends; more are
    refused.
    """
    async with httpx.AsyncClient(base_url=server.url, timeout=DRAIN_S) as http:
        first, *others = bodies(server, count, max_tokens)
        _, tasks = await begin(http, [first])
        tasks += [asyncio.create_task(stream(http, body)) for body in others]
        await asyncio.to_thread(
            wait_until, lambda: sum(server.status()["requests"].values()) == count
        )
        os.killpg(server.process.pid, signal.SIGTERM)
        await until_told_to_end(http)
        assert not any(task.done() for task in tasks)
        refused = await http.post("/v1/completions", json=streamed_body(server.model, [1, 2]))
        streams = await asyncio.gather(*tasks)
    assert refused.status_code == 503
    assert refused.json()["error"]["message"] == "the server is shutting down"
    return streams


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=TWO_DEVICES)])
def test_requests_in_groups_end_within_the_shutdown_timeout(devices: int) -> None:
    """Those that run and those that wait, though the signal comes to engines and workers too, as
    from systemd.
    """
    flags = ("--policy=static-tp", f"--shutdown-timeout={DRAIN_S:g}", "--max-num-seqs=8")
    flags += (f"--tensor-parallel-size={devices}",)
    with two_engines(*flags) as server:
        parts = Parts.of(server)
        before = len(server.log())
        streams = asyncio.run(stream_while_it_ends(server, 12, 150))
        assert [(into.finish_reason, len(into.tokens)) for into in streams] == [
            ("length", 150)
        ] * 12
        wait_until_nothing_is_left(server, parts, TERM_S)
        assert server.process.returncode == 0
        assert_quiet(server.log()[before:])


async def ends_at_the_deadline(server: Server) -> tuple[list[str], list[httpx.Response]]:
    """How long streams in both lanes end after SIGTERM, and what is answered to a request before
    and one after it.
    """
    async with httpx.AsyncClient(base_url=server.url, timeout=DEATH_S) as http:
        whole = {**bodies(server, 1, 2000)[0], "stream": False, "stream_options": None}
        _, tasks = await begin(http, bodies(server, 4, 2000, (2, 4)))
        before = asyncio.create_task(http.post("/v1/completions", json=whole))
        await asyncio.to_thread(wait_until, lambda: sum(server.status()["requests"].values()) == 5)
        server.process.terminate()
        await until_told_to_end(http)
        after = await http.post("/v1/completions", json=whole)
        assert not any(task.done() for task in (*tasks, before))
        return [str(end) for end in await asyncio.gather(*tasks, return_exceptions=True)], [
            await before,
            after,
        ]


@TWO_DEVICES
def test_at_the_deadline_requests_are_told_why_they_end() -> None:
    """With workers of their own too; a request that comes before the deadline is refused at
    once.
    """
    with two_engines("--shutdown-timeout=8", "--tensor-parallel-size=2") as server:
        parts, before = Parts.of(server), len(server.log())
        ends, answers = asyncio.run(ends_at_the_deadline(server))
        assert all("the server is shutting down" in end for end in ends), ends
        assert [(answer.status_code, answer.json()["error"]["message"]) for answer in answers] == [
            (503, "the server is shutting down")
        ] * 2
        wait_until_nothing_is_left(server, parts, TERM_S)
        assert server.process.returncode == 0
        assert_quiet(server.log()[before:])


async def stream_until_an_engine_dies(server: Server, engine: psutil.Process) -> list[str]:
    """Stream, signal all processes, and kill an engine while requests drain. Returns how the
    streams end.
    """
    async with httpx.AsyncClient(base_url=server.url, timeout=DEATH_S) as http:
        _, tasks = await begin(http, bodies(server, 4, 2000), tokens=6)
        os.killpg(server.process.pid, signal.SIGTERM)
        await until_told_to_end(http)
        assert not any(task.done() for task in tasks)
        engine.kill()
        return [str(end) for end in await asyncio.gather(*tasks, return_exceptions=True)]


@GLOO
def test_death_of_an_engine_while_requests_drain_ends_the_server() -> None:
    """Where none can do without it: at once, in order, and not quietly; who waits in a step says
    what it has lost.
    """
    flags = ("--policy=static-tp", "--cpu-collectives=gloo", f"--shutdown-timeout={10 * DRAIN_S:g}")
    with two_engines(*flags) as server:
        parts = Parts.of(server)
        before = len(server.log())
        ends = asyncio.run(stream_until_an_engine_dies(server, parts.engines[1]))
        assert all("the server is shutting down" in end for end in ends), ends
        wait_until_nothing_is_left(server, parts, TERM_S)
        log = server.log()[before:]
        assert "API server: engine client stopped" in log
        assert re.search(
            r"EngineCore encountered a fatal error(.|\n)*(EngineLost|gloo/transport)", log
        ), log
        assert not re.findall(
            r".*(?:never retrieved|never awaited|Exception ignored|does not end in order).*", log
        ), log


@pytest.mark.parametrize(
    ("engine", "flag"),
    [
        (0, "--min-engines=2"),
        (1, "--min-engines=2"),
        pytest.param(0, "--cpu-collectives=gloo", marks=GLOO),
        (1, "--lend-weights"),
    ],
)
def test_death_of_an_engine_ends_a_server_that_needs_all(engine: int, flag: str) -> None:
    """As with stock vLLM: streams end with an error, the server ends by itself, nothing hangs and
    nothing is left.
    """
    with Server("llama", 2, flag) as server:
        server.layout([[0, 1]])
        parts = Parts.of(server)
        asyncio.run(streams_until(server, parts.engines[engine], signal.SIGKILL))
        wait_until_nothing_is_left(server, parts, DEATH_S)
        log = server.log()
        assert (
            "EngineDeadError" in log
            or "died unexpectedly" in log
            or "at least 2 are needed (--min-engines)" in log
        )


def test_engines_end_with_a_server_that_is_killed(server: Server) -> None:
    """Nobody is left to remove its directory, where vLLM's sockets are too: the next start does."""
    parts = Parts.of(server)
    sockets = {path.name for path in parts.run_dir.iterdir() if path.is_socket()}
    server.process.kill()
    server.process.wait()
    gone, alive = psutil.wait_procs(parts.engines, timeout=DEATH_S)
    assert not alive
    assert len(gone) == 2
    assert len(sockets - {"inbox-0", "inbox-1"}) >= 2
    _remove_left(str(SHARED_MEMORY))
    assert not parts.run_dir.exists()


@pytest.mark.parametrize(
    ("phase", "devices"),
    [
        ("joining 2 engines", 1),
        ("loading the model", 1),
        pytest.param("warming up the group", 2, marks=TWO_DEVICES),
    ],
)
def test_sigterm_during_the_start_ends_all_processes(phase: str, devices: int) -> None:
    """At once, in whatever phase the engines and their workers are; with workers, of a command as a
    user starts it (`server/start/interrupts.py`).
    """
    server = Server(
        "llama", 2, f"--tensor-parallel-size={devices}", program=COMMAND if devices > 1 else None
    )
    try:
        wait_until_logged(server, phase)
        # it stays in this phase while it is looked at
        os.killpg(server.process.pid, signal.SIGSTOP)
        root = psutil.Process(server.process.pid)
        parts = Parts(
            root.children(recursive=True), [root], next(SHARED_MEMORY.glob(f"flying-{root.pid}-*"))
        )
        queues = {
            Path(m.path)
            for process in parts.engines
            for m in process.memory_maps()
            if "/psm_" in m.path
        }
        assert len(parts.engines) >= 2 * devices
        assert queues or devices == 1
        server.process.terminate()
        os.killpg(server.process.pid, signal.SIGCONT)
        wait_until_nothing_is_left(server, parts, TERM_S)
        wait_until(lambda: not any(queue.exists() for queue in queues))
        assert server.process.returncode == 128 + signal.SIGTERM
        assert "flying-serving: ended while" in server.log()
        assert "Traceback" not in server.log()
    finally:
        server.stop()


def test_a_start_that_fails_when_engines_are_ready_ends_at_once() -> None:
    """Whatever time requests would have had: there are none."""
    flags = ("--shutdown-timeout=300", "--middleware=flying_serving.nope")
    server = two_engines(*flags)
    try:
        wait_until_logged(server, "warming up the group")
        root = psutil.Process(server.process.pid)
        parts = Parts(
            root.children(recursive=True), [root], next(SHARED_MEMORY.glob(f"flying-{root.pid}-*"))
        )
        wait_until_logged(server, "2 of 2 engines are ready")
        wait_until_nothing_is_left(server, parts, DEATH_S)
        log = server.log()
        assert server.process.returncode != 0
        assert "has no attribute 'nope'" in log
        assert "force killing" not in log
        assert not re.findall(r".*(?:never retrieved|never awaited|Exception ignored).*", log), log
    finally:
        server.stop()


@pytest.fixture(scope="module")
def taken_port() -> Iterator[int]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


@pytest.mark.cpu_only("a wrong flag is refused on any device")
@pytest.mark.parametrize(
    ("start", "arguments", "message"),
    [
        (
            run,
            "{model} --data-parallel-size=2 --group-sizes=3",
            "--group-sizes=3: group size 3 is not one of 1, 2, 4",
        ),
        (
            run,
            "{model} --data-parallel-size=2 --enable-lora --fully-sharded-loras",
            "--fully-sharded-loras: adapters that ranks cut further cannot be served",
        ),
        (
            by_shell,
            "{model} --host=127.0.0.1 --port={port}",
            "--port={port}: address already in use",
        ),
        (run, "{model} --max-model-len=99999999", "max_model_len (99999999) is greater than"),
        (
            run,
            "models/nope",
            "--model=models/nope: there is no such directory, and no model of that name is "
            "available",
        ),
    ],
    ids=["sizes", "LoRA", "port", "length", "model"],
)
def test_start_that_cannot_serve_ends_with_one_line(
    start: Callable[..., subprocess.CompletedProcess[str]],
    arguments: str,
    message: str,
    taken_port: int,
) -> None:
    """Whether we find it or vLLM does, and no traceback with it."""
    done = start(
        [
            "serve",
            *arguments.format(model=tiny("llama"), port=taken_port).split(),
            "--dtype=float32",
        ],
        START_S,
    )
    assert done.returncode == 2, done.stderr[-2000:]
    # vLLM's import says so
    ours = [line for line in done.stderr.splitlines() if not line.startswith("Triton is ")]
    assert len(ours) == 1, done.stderr
    assert ours[0].startswith("flying-serving: ")
    assert message.format(port=taken_port) in ours[0]
    assert "Traceback" not in done.stdout, done.stdout[-3000:]
