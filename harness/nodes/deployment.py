"""A deployment of nodes behind vllm-router, started as a user would; its nodes, and what they
count.
"""

import os
import re
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from flying_deploy.ports import ReservedPort
from flying_lab.server_process import ServerProcess, command
from harness.forked import ENVIRONMENT, ROOT
from harness.live import ready_or_stopped, tiny

READY_S = 240.0
ANSWER_S = 60.0
MODEL = "tiny"
ENGINES = 2
SERVE = (
    f"--served-model-name={MODEL}",
    f"--data-parallel-size={ENGINES}",
    "--policy=manual",
    "--dtype=float32",
    "--max-model-len=2048",
    "--block-size=32",
    "--max-num-batched-tokens=256",
    "--max-num-seqs=16",
    "--kv-cache-memory-bytes=67108864",
    "--shutdown-timeout=30",
)
_STARTED = re.compile(r"^\(node (\d+)\) started at (\S+), process (\d+)$", re.MULTILINE)


@dataclass(frozen=True)
class NodeAt:
    """A node of a deployment, as it was last started."""

    url: str
    process: psutil.Process

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """Its answer, as JSON."""
        return (
            httpx.request(method, self.url + path, json=body, timeout=ANSWER_S)
            .raise_for_status()
            .json()
        )

    def load(self) -> int:
        """How many requests it has."""
        count: int = self.ask("GET", "/load")["load"]
        return count

    def counted(self) -> dict[str, float]:
        """Its metrics by name, added up over their labels."""
        found: defaultdict[str, float] = defaultdict(float)
        text = httpx.get(f"{self.url}/metrics", timeout=ANSWER_S).raise_for_status().text
        for sample in (
            one for family in text_string_to_metric_families(text) for one in family.samples
        ):
            found[sample.name] += sample.value
        return found


class Counts:
    """What nodes have counted since this was made."""

    def __init__(self, nodes: list[NodeAt]) -> None:
        self._nodes = nodes
        self._before = [node.counted() for node in nodes]

    def of(self, name: str) -> list[float]:
        """By node."""
        return [
            node.counted()[name] - before[name]
            for node, before in zip(self._nodes, self._before, strict=True)
        ]

    @property
    def requests(self) -> list[float]:
        """Those that have been answered, by node."""
        return self.of("vllm:request_success_total")

    @property
    def difference(self) -> float:
        """How many fewer requests one node has got, as a share of those of another."""
        return 1 - min(self.requests) / max(self.requests)

    @property
    def hits(self) -> float:
        """The share of prompt tokens that were found in prefix caches."""
        return sum(self.of("vllm:prefix_cache_hits_total")) / sum(
            self.of("vllm:prefix_cache_queries_total")
        )


class Deployment(ServerProcess):
    """`python -m flying_deploy.vllm_router`; `url` is the router's. Use it as a context
    manager.

    `arguments`: those before the `--`. `serve`: what follows it.
    """

    def __init__(self, arguments: Sequence[str], serve: Sequence[str] = ()) -> None:
        self._files = tempfile.TemporaryDirectory()
        port = ReservedPort()
        line = [
            sys.executable,
            "-m",
            "flying_deploy.vllm_router",
            f"--port={port.number}",
            *arguments,
        ]
        line += ["--", *serve] if serve else []
        environment = os.environ | ENVIRONMENT
        super().__init__(command(line, ROOT), environment, port, Path(self._files.name, "log"))

    @classmethod
    def of_nodes(cls, count: int, *arguments: str) -> Self:
        """With nodes of their own."""
        return cls([f"--nodes={count}", *arguments], [str(tiny("llama")), *SERVE])

    @classmethod
    def before(cls, nodes: Sequence[NodeAt], *arguments: str) -> Self:
        """A router before nodes that run already."""
        return cls([*(f"--node-url={node.url}" for node in nodes), *arguments])

    def nodes(self) -> list[NodeAt]:
        """Its nodes by their numbers, as they were last started."""
        last = {int(number): (url, int(pid)) for number, url, pid in _STARTED.findall(self.log())}
        return [NodeAt(url, psutil.Process(pid)) for _, (url, pid) in sorted(last.items())]

    def times_ready(self, number: int) -> int:
        """How often a node got ready."""
        return self.log().count(f"(node {number}) ready after")

    def __enter__(self) -> Self:
        ready_or_stopped(self, READY_S)
        return self

    def stop(self) -> bool:
        """End it; its log is gone then."""
        clean = super().stop()
        self._files.cleanup()
        return clean
