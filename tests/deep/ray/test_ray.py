"""Two nodes of two engines on a local Ray cluster: what clients of Ray's HTTP proxy see of them.

`make test-ray` runs this, as Ray is not in the environment of the other tests.
"""

import asyncio
import gc
import itertools
import os
import random
import tempfile
import time
import uuid
import warnings
from collections import Counter
from collections.abc import Callable, Iterator

import httpx
import pytest
import ray
from ray import serve

from flying_deploy.ports import HOST, ReservedPort
from harness.forked import ENVIRONMENT, ROOT
from harness.live import tiny
from harness.streams import RequestFailed, Stream, begin, stream
from tests.deep.ray.cluster import (
    AFTER_S,
    CLIENTS,
    DRAIN_S,
    FLAGS,
    STREAMS,
    VOCAB,
    WORST_SHARE,
    Cluster,
    Job,
    ask_anew,
    assert_same,
    end_of,
    make_jobs,
    mean_loads,
    right_answers,
    until,
    url_of,
    used,
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A cluster with one application of two nodes, whose number Ray may change by the load."""
    told = {"RAY_AUTH_TOKEN": uuid.uuid4().hex + uuid.uuid4().hex, "RAY_USAGE_STATS_ENABLED": "0"}
    # otherwise as many processes as there are CPUs, which nothing here uses
    told["RAY_prestart_worker_first_driver"] = "0"
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
                "import_path": "flying_deploy.ray:app",
                "args": args | {"drain_timeout_s": DRAIN_S},
            }
            made = Cluster(port.url, model, {"name": "default", "route_prefix": "/"} | app)
            made.scale(2, 2)
            made.wait_for(2)
            yield made
        finally:
            serve.shutdown()
            with warnings.catch_warnings():
                # Ray does not wait for processes that it ends
                warnings.simplefilter("ignore", ResourceWarning)
                ray.shutdown()
                gc.collect()


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


async def test_node_stops_a_request_whose_client_has_left(cluster: Cluster) -> None:
    """Ray tells the replica that the client has gone, and the replica the node."""
    nodes = cluster.processes().values()
    job = Job((1, 2, 3), 3000, seed=5000)
    async with cluster.client() as http:
        await stream(http, job.body(cluster.model), leave_after=5)
    loads = [f"{url_of(node)}/load" for node in nodes]
    await until(lambda: not any(httpx.get(load).json()["load"] for load in loads))


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
