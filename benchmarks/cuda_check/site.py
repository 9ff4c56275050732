"""The servers of the check, started when a line first needs one: stock vLLM, and ours of four
engines.
"""

from collections.abc import Callable
from functools import partial

from harness.live import STOCK, Server

ENGINES = 4
SAME_FLAGS = (
    "--enforce-eager",
    "--no-async-scheduling",
    "--max-model-len=2048",
    "--max-num-seqs=16",
    "--kv-cache-memory-bytes=67108864",
)
ONE_GPU = (f"--engines-per-device={ENGINES}", "--gpu-memory-utilization=0.1")
"""All engines of ours are on one GPU."""


class Site:
    """The servers by name. `has_gpu`: they run on it; otherwise on the CPU."""

    def __init__(self, *, has_gpu: bool) -> None:
        self._has_gpu = has_gpu
        self._servers: dict[str, Server] = {}

    def stock(self, dtype: str) -> Server:
        """Stock vLLM with the tiny model. `dtype`: as of --dtype."""
        make = partial(
            Server,
            "llama",
            1,
            base=(f"--dtype={dtype}", *SAME_FLAGS),
            program=STOCK,
            environment={"VLLM_PLUGINS": ""},
        )
        return self._server(f"stock {dtype}", make)

    def ours(self, dtype: str) -> Server:
        """Four engines with the tiny model, under the policy `manual`."""
        shared = ONE_GPU if self._has_gpu else ()
        flags = ("--policy=manual", f"--dtype={dtype}", *SAME_FLAGS, *shared)
        return self._server(f"ours {dtype}", partial(Server, "llama", ENGINES, base=flags))

    def _server(self, name: str, make: Callable[[], Server]) -> Server:
        if name not in self._servers:
            server = make()
            self._servers[name] = server
            try:
                server.__enter__()
            except BaseException:
                del self._servers[name]
                raise
        return self._servers[name]

    def end(self) -> None:
        """End all servers; a line that comes later starts its own again."""
        servers = list(self._servers.values())
        self._servers.clear()
        for server in servers:
            server.stop()
