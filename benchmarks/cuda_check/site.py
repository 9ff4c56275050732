"""The servers of the check, by name: stock vLLM, and ours of four engines or of one."""

import json
import os
import shutil
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.cuda_check.lines import Needed, NotRun
from flying_serving.errors import ServerFailed
from harness import triton_cpu
from harness.forked import ENVIRONMENT
from harness.live import COMMAND, STOCK, Server, tiny

ENGINES = 4
FORCE = "--logits-processors=tests.stock.force:ForceTokens"
SMALL = (
    "--enforce-eager",
    "--no-async-scheduling",
    "--max-model-len=2048",
    "--block-size=32",
    "--max-num-seqs=16",
    "--kv-cache-memory-bytes=67108864",
)
LARGE = (
    "--dtype=bfloat16",
    "--load-format=dummy",
    "--max-model-len=4096",
    "--max-num-seqs=32",
    "--kv-cache-memory-bytes=1G",
    "--no-enable-prefix-caching",
)
TRITON = "--attention-backend=TRITON_ATTN"
"""The backend of float32 on a GPU."""
LARGE_CONFIG = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 12,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "dtype": "bfloat16",
}
"""An 8B model with 12 of its 32 layers: that of the run before (docs/cuda.md)."""


@dataclass(frozen=True)
class Spec:
    """A server. `engines`: 0 for stock vLLM. `large`: it times the model of LARGE_CONFIG."""

    engines: int
    flags: tuple[str, ...]
    large: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)


def specs(*, has_gpu: bool) -> dict[str, Spec]:
    """Return all servers by name: those of V2 run in Triton's interpreter without a GPU."""
    v2 = {"VLLM_USE_V2_MODEL_RUNNER": "1"} if has_gpu else triton_cpu.ENVIRONMENT
    attention = (TRITON,) if has_gpu else ()
    exact, half = (*SMALL, "--dtype=float32", *attention), (*SMALL, "--dtype=bfloat16")
    eager = (*LARGE, "--enforce-eager", "--no-async-scheduling")
    return {
        "stock float32": Spec(0, (*exact, FORCE)),
        "ours float32": Spec(ENGINES, (*exact, FORCE)),
        "stock bfloat16": Spec(0, (*half, FORCE)),
        "ours bfloat16": Spec(ENGINES, (*half, FORCE)),
        "stock V2": Spec(0, exact, environment=v2),
        "ours V2": Spec(2, exact, environment=v2),
        # the place asks for V1, and vLLM by default takes V2
        "stock default": Spec(0, LARGE, large=True, environment=v2),
        "stock eager": Spec(0, eager, large=True),
        "ours eager": Spec(1, eager, large=True),
        "ours default": Spec(
            1, (*LARGE, "--cuda-graphs", "-cc.mode=3"), large=True, environment=v2
        ),
    }


def large_model() -> Path:
    """Write the model of LARGE_CONFIG, without weights, beside the tiny one."""
    small = tiny("llama")
    folder = small.with_name("cuda-check-8b")
    shutil.copytree(
        small, folder, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True
    )
    config = json.loads((small / "config.json").read_text()) | LARGE_CONFIG
    (folder / "config.json").write_text(json.dumps(config))
    return folder


class Site:
    """The servers by name. `has_gpu`: they run on it; otherwise on the CPU."""

    def __init__(self, *, has_gpu: bool) -> None:
        self.has_gpu = has_gpu
        self._specs = specs(has_gpu=has_gpu)
        self._servers: dict[str, Server] = {}
        self._lost: dict[str, str] = {}

    def __getitem__(self, name: str) -> Server:
        """Return a server that a line has asked for."""
        return self._servers[name]

    def prepare(self, needed: Needed) -> None:
        """Have the servers of a line ready; see `lines.Place`. Nothing starts ahead on the CPU.

        Raises:
            NotRun: if a server does not start. It is not tried again.
        """
        soon = needed.ahead if self.has_gpu else ()
        names = (*needed.servers, *needed.beside, *soon)
        for name in self._servers.keys() - set(names):
            self._servers.pop(name).stop()
        for name in names:
            if name not in self._servers and name not in self._lost:
                self._servers[name] = self._begin(self._specs[name])
        for name in (*needed.beside, *needed.servers):
            self._wait_for(name)
        for name in needed.servers:
            if name in self._lost:
                raise NotRun(f"{name} does not start: {self._lost[name]}")

    def _wait_for(self, name: str) -> None:
        """Wait until a server is ready, or known not to start."""
        server = self._servers.get(name)
        if server is None or server.ready:
            return
        try:
            server.__enter__()
        except (ServerFailed, OSError) as error:
            if self._servers.get(name) is not server:
                return  # it was given up, and may have been started anew
            del self._servers[name]
            *_, last = str(error).strip().splitlines() or [type(error).__name__]
            self._lost[name] = last[-200:]

    def _begin(self, spec: Spec) -> Server:
        """Start a server, without waiting for it."""
        model = large_model() if spec.large else "llama"
        environment = {**ENVIRONMENT, **spec.environment}
        if spec.engines == 0:
            environment |= {"VLLM_PLUGINS": ""}
            return Server(model, 1, base=spec.flags, program=STOCK, environment=environment)
        flags = ("--policy=manual", *spec.flags)
        # variables that vLLM reads at import need an interpreter of their own
        program = COMMAND if spec.environment else None
        return Server(model, spec.engines, base=flags, program=program, environment=environment)

    def give_up(self, overdue: Sequence[str]) -> None:
        """Kill all servers: one may hang, and a later line starts its own again; see
        `lines.Place`.
        """
        for name, server in self._servers.items():
            if name in overdue and not server.ready:
                self._lost[name] = "it was not ready in time"
            _kill(server)
        self.end()

    def end(self) -> None:
        """End all servers."""
        servers = list(self._servers.values())
        self._servers.clear()
        for server in servers:
            server.stop()


def _kill(server: Server) -> None:
    """Kill all processes of a server."""
    with suppress(ProcessLookupError):
        os.killpg(server.process.pid, signal.SIGKILL)
