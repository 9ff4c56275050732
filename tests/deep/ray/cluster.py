"""A local Ray cluster with nodes of two engines, and requests to its HTTP proxy."""

import asyncio
import contextlib
import json
import os
import random
import select
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema

from flying_deploy.ports import HOST
from harness.live import wait_until
from harness.streams import (
    WORST_LOGPROB,
    RequestFailed,
    Stream,
    stream,
    streamed_body,
    worst_difference,
)

FLAGS = (
    "--policy=manual --dtype=float32 --max-model-len=4096 --max-num-batched-tokens=256 "
    "--max-num-seqs=32"
)
FLAGS += " --block-size=32 --kv-cache-memory-bytes=67108864"
DRAIN_S = 60
TIMEOUT_S = 60.0
START_S = 240.0
AFTER_S = 4.0
"""How long new requests go on after a node has died."""
STREAMS, CLIENTS, WORST_SHARE = 200, 24, 0.2
VOCAB = 512


@dataclass(frozen=True)
class Job:
    """One request. `seed`: also its name."""

    prompt: tuple[int, ...]
    max_tokens: int
    seed: int

    def body(self, model: str) -> dict[str, Any]:
        """What is sent."""
        fields = {
            "max_tokens": self.max_tokens,
            "seed": self.seed,
            "temperature": 1.0,
            "ignore_eos": True,
        }
        return streamed_body(model, self.prompt, **fields)


def make_jobs(count: int, draw: random.Random) -> list[Job]:
    """Requests of 5 to 400 prompt tokens and 8 to 60 output tokens; three in four begin as one of
    four others.
    """
    begins = [tuple(draw.randrange(VOCAB) for _ in range(96)) for _ in range(4)]
    jobs = []
    for seed in range(count):
        length = round(5 * 80 ** draw.random())
        begin = draw.choice(begins) if seed % 4 else ()
        jobs.append(
            Job(
                (*begin, *(draw.randrange(VOCAB) for _ in range(length))), draw.randint(8, 60), seed
            )
        )
    return jobs


@dataclass
class Cluster:
    """The application, as its clients and its operator see it. `nodes`: by a request's seed, which
    replica answered.
    """

    url: str
    model: str
    config: dict[str, Any]
    nodes: dict[int, str] = field(default_factory=dict)

    def client(self) -> httpx.AsyncClient:
        """A client of Ray's HTTP proxy, which notes the replica of each answer."""

        async def note(answer: httpx.Response) -> None:
            self.nodes[json.loads(answer.request.content)["seed"]] = answer.headers.get(
                "x-flying-node", "none"
            )

        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        hooks = {"response": [note]}
        return httpx.AsyncClient(
            base_url=self.url, timeout=TIMEOUT_S, limits=limits, event_hooks=hooks
        )

    def scale(self, fewest: int, most: int) -> None:
        """Let the load decide between these numbers of nodes, at once. No node starts again for
        another number.
        """
        policy = {"policy_function": "flying_deploy.scaling:by_load"}
        scaling = {
            "min_replicas": fewest,
            "max_replicas": most,
            "target_ongoing_requests": 64,
            "policy": policy,
        }
        self.config["deployments"] = [
            {"name": "Node", "autoscaling_config": scaling | {"downscale_delay_s": 0}}
        ]
        _get_global_client().deploy_apps(
            ServeDeploySchema.model_validate({"applications": [self.config]})
        )

    def processes(self) -> dict[str, psutil.Process]:
        """The nodes' processes, by the names of the replicas that serve."""
        details = (
            _get_global_client()
            .get_serve_details()["applications"]
            .get("default", {"deployments": {}})
        )
        replicas = [
            one for deployment in details["deployments"].values() for one in deployment["replicas"]
        ]
        serving = [one for one in replicas if one["state"] == "RUNNING"]
        found = {one["replica_id"]: psutil.Process(one["pid"]).children() for one in serving}
        return {name: children[0] for name, children in found.items() if children}

    def wait_for(self, count: int) -> dict[str, psutil.Process]:
        """Wait until as many nodes serve."""
        wait_until(lambda: len(self.processes()) == count, lambda: serve.status(), START_S)
        return self.processes()


async def until(true: Callable[[], object], within_s: float = TIMEOUT_S) -> None:
    """Return once `true()` is; fail if it is not in time."""
    await asyncio.to_thread(wait_until, true, within_s=within_s)


def url_of(node: psutil.Process) -> str:
    """Where a node listens, on this machine."""
    listens = [
        one.laddr for one in node.net_connections("tcp4") if one.status == psutil.CONN_LISTEN
    ]
    (place,) = (place for place in listens if place.ip == HOST)
    return f"http://{HOST}:{place.port}"


async def right_answers(node: psutil.Process, model: str, jobs: Sequence[Job]) -> dict[int, Stream]:
    """What one node gives for requests that it gets directly, by their seeds."""
    clients = asyncio.Semaphore(CLIENTS)
    async with httpx.AsyncClient(base_url=url_of(node), timeout=TIMEOUT_S) as http:

        async def ask(job: Job) -> Stream:
            async with clients:
                return await stream(http, job.body(model))

        answers = await asyncio.gather(*(ask(job) for job in jobs))
    return {job.seed: answer for job, answer in zip(jobs, answers, strict=True)}


async def mean_loads(
    nodes: Sequence[psutil.Process], meanwhile: asyncio.Future[Any]
) -> list[float]:
    """Requests that nodes have under way, by `GET /load` and on average until something is done."""
    asked = []
    async with contextlib.AsyncExitStack() as stack:
        each = [
            await stack.enter_async_context(httpx.AsyncClient(base_url=url_of(node)))
            for node in nodes
        ]
        while not meanwhile.done():
            answers = await asyncio.gather(*(http.get("/load") for http in each))
            asked.append([answer.json()["load"] for answer in answers])
            await asyncio.sleep(0.05)
    return [statistics.mean(loads) for loads in zip(*asked, strict=True)]


def assert_same(found: Stream, right: Stream) -> None:
    """Complete, and token for token what is right."""
    assert found.done
    assert found.tokens == right.tokens
    assert found.text == right.text
    assert found.finish_reason == "length"
    assert worst_difference(found.logprobs, right.logprobs) <= WORST_LOGPROB


@dataclass
class New:
    """One new request after a node's death. `problem`: why it was not served; None if it was."""

    asked_s: float
    problem: str | None = None
    served_s: float = 0.0


async def ask_anew(cluster: Cluster, seeds: Iterator[int], going: Callable[[], bool]) -> list[New]:
    """Ask for 4 tokens every 50 ms, as long as `going()`; times are from the beginning."""
    began_s = time.monotonic()
    asked: list[New] = []
    async with cluster.client() as http, asyncio.TaskGroup() as tasks:

        async def ask(new: New, seed: int) -> None:
            try:
                await stream(http, Job((seed % VOCAB,), 4, seed).body(cluster.model))
            except (RequestFailed, httpx.HTTPError) as error:
                new.problem = repr(error)
            new.served_s = time.monotonic() - began_s

        while going():
            asked.append(New(time.monotonic() - began_s))
            tasks.create_task(ask(asked[-1], next(seeds)))
            await asyncio.sleep(0.05)
    return asked


async def used(cluster: Cluster, seeds: Iterator[int]) -> dict[str, psutil.Process]:
    """The nodes, once each of them gets requests: Ray's proxy hears a little later of those that
    are ready.
    """
    nodes = cluster.processes()
    cluster.nodes.clear()
    await ask_anew(cluster, seeds, lambda: not nodes.keys() <= set(cluster.nodes.values()))
    return nodes


def end_of(process: psutil.Process) -> Callable[[], float]:
    """Seconds since a process has ended, 0 until then: one that is killed still has to give up its
    memory.
    """
    sentinel = os.pidfd_open(process.pid)
    ended_s: list[float] = []

    def watch() -> None:
        select.select([sentinel], [], [])
        ended_s.append(time.monotonic())
        os.close(sentinel)

    threading.Thread(target=watch, daemon=True).start()
    return lambda: time.monotonic() - ended_s[0] if ended_s else 0.0
