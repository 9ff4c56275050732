"""vllm-router with the flags of its manifest, and a stand-in for Kubernetes' API: it finds the
nodes of theirs.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path

import httpx
import pytest

from flying_deploy.ports import HOST, ReservedPort
from flying_deploy.vllm_router.options import SCALE_OUT, SETTINGS
from harness.live import READY_S, wait_until
from tests.deep.deploy.cluster import NAMESPACE, PIECES, Cluster, StreamingNode, serving
from tests.deep.deploy.manifests import NODES, ROUTER, Object, container, find, probes, rendered

LABELS: dict[str, dict[str, str]] = {
    name: find(rendered(), "Deployment", name)["spec"]["template"]["metadata"]["labels"]
    for name in (NODES, ROUTER)
}


@dataclass
class Routed:
    """A router and what is around it."""

    cluster: Cluster
    node: StreamingNode
    http: httpx.Client
    process: subprocess.Popen[bytes]
    log: Path

    def probe(self, name: str) -> int:
        """The status that a probe of the manifest gets."""
        path = dict(probes(find(rendered(), "Deployment", ROUTER)))[name]["httpGet"]["path"]
        return self.http.get(path).status_code

    def wait_until_probe(self, name: str, status: int) -> None:
        """Fails with the router's log."""
        wait_until(lambda: self.probe(name) == status, self.log.read_text)


def line(router: Object, ports: dict[str, int]) -> list[str]:
    """The router's command here, with other ports."""
    (script,) = container(router)["command"]
    (entry,) = entry_points(group="console_scripts", name=script)
    told = {**ports, "host": HOST, "prometheus-host": HOST}
    flags = [
        flag
        for flag in container(router)["args"]
        if flag.removeprefix("--").partition("=")[0] not in told
    ]
    assert len(flags) == len(container(router)["args"]) - len(told)
    flags = [flag.replace("$(NAMESPACE)", NAMESPACE) for flag in flags]
    return [
        sys.executable,
        "-m",
        entry.module,
        *flags,
        *(f"--{name}={value}" for name, value in told.items()),
    ]


@contextmanager
def routed(folder: Path) -> Iterator[Routed]:
    """A router that knows of no pod yet."""
    cluster, node = Cluster(), StreamingNode()
    with (
        serving(cluster.handler()) as api,
        serving(node.handler()) as port,
        ReservedPort() as own,
        ReservedPort() as metrics,
    ):
        ports = {
            "port": own.number,
            "service-discovery-port": port,
            "prometheus-port": metrics.number,
        }
        environment = os.environ | {
            "KUBECONFIG": str(cluster.configuration(folder / "kubeconfig", api))
        }
        command, log = line(find(rendered(), "Deployment", ROUTER), ports), folder / "log"
        with (
            log.open("wb") as out,
            subprocess.Popen(command, env=environment, stdout=out, stderr=out) as process,
        ):
            try:
                with httpx.Client(base_url=own.url, timeout=60) as http:
                    yield Routed(cluster, node, http, process, log)
            finally:
                process.kill()


def answers(here: Routed) -> bool:
    """Whether the router listens."""
    try:
        return here.probe("livenessProbe") == 200
    except httpx.TransportError:
        assert here.process.poll() is None, here.log.read_text()
        return False


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Routed]:
    with routed(tmp_path) as found:
        wait_until(lambda: answers(found), found.log.read_text, READY_S)
        yield found


def test_flags_are_those_that_we_start_a_router_and_nodes_with() -> None:
    nodes, router = (
        container(find(rendered(), "Deployment", name))["args"] for name in (NODES, ROUTER)
    )
    assert {f"{flag}={value}" for flag, value in SETTINGS.items()} <= set(router)
    assert SCALE_OUT in nodes


def test_router_follows_nodes_by_label_and_readiness(here: Routed) -> None:
    """A node that drains is left out, also before the kubelet has noticed; streams go on, of a
    router that ends too.
    """
    here.cluster.set("router", LABELS[ROUTER], ready=True)
    here.cluster.set("node", LABELS[NODES], ready=False)
    here.wait_until_probe("readinessProbe", 503)
    here.cluster.set("node", LABELS[NODES], ready=True)
    here.wait_until_probe("readinessProbe", 200)
    here.cluster.set("node", LABELS[NODES], ready=False)
    here.wait_until_probe("readinessProbe", 503)
    here.cluster.set("node", LABELS[NODES], ready=True)
    here.wait_until_probe("readinessProbe", 200)
    here.node.drains = True
    here.wait_until_probe("readinessProbe", 503)
    here.node.drains = False
    here.wait_until_probe("readinessProbe", 200)
    body = {"model": "model", "prompt": "a", "stream": True}
    with here.http.stream(
        "POST", "/v1/completions", json=body, headers={"Authorization": "Bearer key"}
    ) as stream:
        lines = stream.iter_lines()
        found = [next(lines)]
        here.cluster.set("node", LABELS[NODES], ready=True, ends=True)
        here.wait_until_probe("readinessProbe", 503)
        here.process.send_signal(signal.SIGTERM)
        here.node.go_on.set()
        found += lines
    assert [int(one.removeprefix("data: ")) for one in found if one] == list(range(PIECES))
    assert here.node.keys == ["Bearer key"]
    assert here.process.wait(60) == 0
    assert here.cluster.refused == []
