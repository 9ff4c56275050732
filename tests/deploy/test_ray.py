"""Two nodes of two engines on a local Ray cluster: what clients of Ray's HTTP proxy see of them.

`make test-ray` runs this, as Ray is not in the environment of the other tests.
"""

import asyncio
import contextlib
import gc
import inspect
import itertools
import json
import os
import random
import select
import statistics
import tempfile
import threading
import time
import uuid
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil
import pytest
import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingContext
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema

from flying_serving.deploy.ports import HOST, ReservedPort
from flying_serving.deploy.scaling import LOAD, by_load
from harness.forked import ENVIRONMENT, ROOT
from harness.live import tiny, wait_until
from harness.streams import (
    WORST_LOGPROB,
    RequestFailed,
    Stream,
    begin,
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
START_S = 100.0
AFTER_S = 4.0
"""How long new requests go on after a node has died."""
"""From a node's death until new requests are served again, at the most."""
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
        policy = {"policy_function": "flying_serving.deploy.scaling:by_load"}
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


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A cluster with one application of two nodes, whose number Ray may change by the load."""
    told = {"RAY_AUTH_TOKEN": uuid.uuid4().hex + uuid.uuid4().hex, "RAY_USAGE_STATS_ENABLED": "0"}
    told["RAY_prestart_worker_first_driver"] = (
        "0"  # as many processes as there are CPUs, which nothing here uses
    )
    told["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    with (
        ReservedPort() as port,
        pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryDirectory(prefix="flying-ray-") as folder,
    ):
        for name, value in (ENVIRONMENT | told).items():
            patch.setenv(name, value)
        try:
            ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, _temp_dir=folder)
            serve.start(http_options={"host": HOST, "port": port.number})
            model = str(tiny("llama"))
            args = {"model": model, "min_nodes": 2, "max_nodes": 2, "engines": 2, "flags": FLAGS}
            app = {
                "import_path": "flying_serving.deploy.ray:app",
                "args": args | {"drain_timeout_s": DRAIN_S},
            }
            made = Cluster(port.url, model, {"name": "default", "route_prefix": "/"} | app)
            made.scale(2, 2)
            made.wait_for(2)
            yield made
        finally:
            serve.shutdown()
            with warnings.catch_warnings():
                warnings.simplefilter(
                    "ignore", ResourceWarning
                )  # Ray does not wait for processes that it ends
                ray.shutdown()
                gc.collect()


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
    assert (found.tokens, found.text, found.finish_reason) == (right.tokens, right.text, "length")
    assert worst_difference(found.logprobs, right.logprobs) <= WORST_LOGPROB


async def test_streams_are_right_and_nodes_share_them(
    cluster: Cluster, record_property: Callable[[str, object], None]
) -> None:
    """200 of them, from 24 clients; each request four times.

    Ray's proxy gives a request to the node with fewer under way, so what is alike is that: the
    quicker node has more of them done.
    """
    draw = random.Random(29)
    distinct = make_jobs(STREAMS // 4, draw)
    jobs = [
        Job(job.prompt, job.max_tokens, job.seed + 1000 * time)
        for time in range(4)
        for job in distinct
    ]
    draw.shuffle(jobs)
    waiting = list(jobs)
    answers: dict[int, Stream] = {}
    async with cluster.client() as http:

        async def ask() -> None:
            while waiting:
                job = waiting.pop()
                answers[job.seed] = await stream(http, job.body(cluster.model))

        began_s = time.monotonic()
        asking = asyncio.gather(*(ask() for _ in range(CLIENTS)))
        loads = await mean_loads(list(cluster.processes().values()), asking)
        await asking
        record_property("seconds", round(time.monotonic() - began_s, 1))
    right = await right_answers(next(iter(cluster.processes().values())), cluster.model, jobs)
    for job in jobs:
        assert_same(answers[job.seed], right[job.seed])
    record_property(
        "requests per node", sorted(Counter(cluster.nodes[job.seed] for job in jobs).values())
    )
    record_property("mean load", [round(load, 1) for load in loads])
    assert 1 - min(loads) / max(loads) <= WORST_SHARE


async def test_a_node_stops_what_its_client_has_left(cluster: Cluster) -> None:
    """Ray tells the replica that the client has gone, and the replica the node."""
    nodes = cluster.processes().values()
    job = Job((1, 2, 3), 3000, seed=5000)
    async with cluster.client() as http:
        await stream(http, job.body(cluster.model), leave_after=5)
    loads = [f"{url_of(node)}/load" for node in nodes]
    await until(lambda: not any(httpx.get(load).json()["load"] for load in loads))


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


async def test_a_dead_node_takes_only_its_own_streams_along(
    cluster: Cluster, record_property: Callable[[str, object], None]
) -> None:
    """New requests are served by the other, and the node returns by itself."""
    before = await used(cluster, itertools.count(5500))
    jobs = [Job((7, seed % VOCAB), 400, seed) for seed in range(6000, 6012)]
    async with cluster.client() as http:
        streams, tasks = await begin(http, [job.body(cluster.model) for job in jobs])
        dead, alive = sorted(before)
        assert {cluster.nodes[job.seed] for job in jobs} == {dead, alive}
        killed_s = time.monotonic()
        since_death_s = end_of(before[dead])
        before[dead].kill()
        new = await ask_anew(cluster, itertools.count(7000), lambda: since_death_s() < AFTER_S)
        died_s = time.monotonic() - killed_s - since_death_s()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    right = await right_answers(before[alive], cluster.model, jobs)
    for job, found, outcome in zip(jobs, streams, ended, strict=True):
        if cluster.nodes[job.seed] == alive:
            assert_same(found, right[job.seed])
        else:
            assert isinstance(outcome, httpx.HTTPError | RequestFailed)
    refused = [one for one in new if one.problem]
    last_s = max((one.asked_s for one in refused), default=0.0)
    told = (
        f"{len(refused)} of {len(new)}, the last asked after {last_s:.2f} s; the node "
        f"died after {died_s:.2f} s"
    )
    record_property("new requests not served", told)
    record_property(
        "slowest new request, s", round(max(one.served_s - one.asked_s for one in new), 2)
    )
    assert any(one.asked_s > max(last_s, died_s) for one in new if not one.problem), refused
    await asyncio.to_thread(cluster.wait_for, 2)
    record_property("two nodes again after, s", round(time.monotonic() - killed_s, 1))
    assert alive in await used(cluster, itertools.count(8000))


async def test_no_request_is_lost_when_a_node_is_drained(
    cluster: Cluster, record_property: Callable[[str, object], None]
) -> None:
    """As the load asks for one node and not two; the other ends when its requests have ended."""
    before = await used(cluster, itertools.count(8500))
    jobs = [Job((9, seed % VOCAB), 700, seed) for seed in range(9000, 9008)]
    async with cluster.client() as http:
        streams, tasks = await begin(http, [job.body(cluster.model) for job in jobs])
        assert {cluster.nodes[job.seed] for job in jobs} == set(before)
        cluster.scale(1, 2)
        new = await ask_anew(
            cluster, itertools.count(10_000), lambda: len(cluster.processes()) != 1
        )
        (left,) = cluster.processes()
        going = {
            cluster.nodes[job.seed]
            for job, task in zip(jobs, tasks, strict=True)
            if not task.done()
        }
        assert going == set(before), "streams ended before a node was drained"
        new += await ask_anew(
            cluster, itertools.count(11_000), lambda: not all(task.done() for task in tasks)
        )
        await asyncio.gather(*tasks)
    drained = before.keys() - {left}
    for name in drained:
        await until(lambda name=name: not before[name].is_running(), within_s=20)
    right = await right_answers(before[left], cluster.model, jobs)
    for job, found in zip(jobs, streams, strict=True):
        assert_same(found, right[job.seed])
    assert not [one for one in new if one.problem]
    record_property(
        "requests while it drained", f"{len(jobs)} streams and {len(new)} new ones, none lost"
    )


async def test_a_node_ends_with_its_replica(cluster: Cluster) -> None:
    """Though the kernel kills the replica."""
    node = next(iter(cluster.processes().values()))
    engines = node.children(recursive=True)
    replica = node.parent()
    assert replica is not None
    replica.kill()
    await until(lambda: not any(one.is_running() for one in (node, *engines)))


def context(loads: Sequence[float], queued: float, per_node: float) -> AutoscalingContext:
    """What Ray tells a policy of nodes with these loads, of which the last has not told it yet."""
    config = AutoscalingConfig(min_replicas=1, max_replicas=9, target_ongoing_requests=per_node)
    given = dict.fromkeys(inspect.signature(AutoscalingContext).parameters)
    given |= {
        "running_replicas": [*range(len(loads) + 1)],
        "aggregated_metrics": {LOAD: dict(enumerate(loads))},
    }
    return AutoscalingContext(
        **given | {"total_queued_requests": queued, "config": config, "target_num_replicas": 5}
    )


@pytest.mark.parametrize(
    ("loads", "queued", "per_node", "nodes"),
    [((6, 10), 4, 8, 5), ((30, 10), 4, 8, 5.5), ((), 100, 8, 12.5), ((3,), 0, 0.5, 6)],
)
def test_as_many_nodes_as_the_load_asks_for(
    loads: Sequence[float], queued: float, per_node: float, nodes: float
) -> None:
    """Not fewer than there are, while a node has not told its load."""
    assert by_load(context(loads, queued, per_node)) == (nodes, {})


def test_nodes_that_have_all_told_their_load_may_be_fewer() -> None:
    told = context((6, 10), 4, 8)
    told.running_replicas.pop()
    assert by_load(told) == (2.5, {})
