"""The servers of the check, by name: stock vLLM, and ours of one, two or four engines."""

import json
import os
import re
import shutil
import signal
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from benchmarks.cuda_check.lines import Outcome, Result
from benchmarks.cuda_check.starting import Begun
from harness import both_ways, triton_cpu
from harness.forked import ENVIRONMENT
from harness.live import COMMAND, STOCK, Server, tiny

ENGINES = 4
FORCE = "--logits-processors=harness.force:ForceTokens"
SMALL = (
    "--enforce-eager",
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
ONE_STEP = ("--max-model-len=9216", "--max-num-batched-tokens=9216")
"""Over LARGE: a prompt of 8,000 tokens is one step."""
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
"""An 8B model with 12 of its 32 layers: that of the run before (docs/design/cuda.md)."""


STAMPED = "from benchmarks import stamped; stamped.install()"
"""What runs in a server whose steps get time stamps."""


@dataclass(frozen=True)
class Spec:
    """A server. `engines`: 0 for stock vLLM. `large`: it has the model of LARGE_CONFIG. `preamble`:
    Python code that runs in it first.
    """

    engines: int
    flags: tuple[str, ...]
    large: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    preamble: str = ""


def specs(*, has_gpu: bool) -> dict[str, Spec]:
    """Return all servers by name: those of V2 run in Triton's interpreter without a GPU.

    Where ours is timed beside stock, both schedule asynchronously, as vLLM does by default.
    """
    v2 = {"VLLM_USE_V2_MODEL_RUNNER": "1"} if has_gpu else triton_cpu.ENVIRONMENT
    exact, half = (*SMALL, "--dtype=float32"), (*SMALL, "--dtype=bfloat16")
    exact += (TRITON,) if has_gpu else ()
    in_order, ahead = ("--no-async-scheduling",), ("--async-scheduling",)
    eager = (*LARGE, "--enforce-eager")
    by_default = (*LARGE, "--no-enforce-eager")  # the place sets it otherwise
    decodes = ("-cc.mode=0", "-cc.cudagraph_mode=FULL_DECODE_ONLY")
    # the place asks for V1, and vLLM by default takes V2
    return {
        "stock default": Spec(0, LARGE, large=True, environment=v2),
        "ours compiled": Spec(1, (*by_default, *ahead), large=True, environment=v2),
        "ours compiled lanes": Spec(2, (*by_default, *ahead), large=True, environment=v2),
        "stock eager": Spec(0, eager, large=True, environment=v2),
        "ours lanes": Spec(2, (*eager, *ahead), large=True, environment=v2),
        "stock float32": Spec(0, (*exact, *in_order, FORCE)),
        "ours float32": Spec(ENGINES, (*exact, *in_order, FORCE)),
        "stock graphs": Spec(0, (*LARGE, *decodes), large=True),
        "ours graphs": Spec(1, (*LARGE, "--cuda-graphs", "-cc.mode=0", *ahead), large=True),
        "stock V2": Spec(0, exact, environment=v2),
        "ours V2": Spec(2, (*exact, *(ahead if has_gpu else in_order)), environment=v2),
        "ours lending": Spec(
            2,
            (*eager, *in_order, "--lend-weights", "--kv-cache-memory-bytes=64M"),
            large=True,
        ),
        "ours both ways": Spec(ENGINES, (*exact, *in_order), preamble=both_ways.PREAMBLE),
        "ours both ways, large": Spec(
            2, (*eager, *in_order, *ONE_STEP), large=True, preamble=both_ways.PREAMBLE
        ),
        "ours stamped": Spec(2, (*exact, *in_order, "--max-num-seqs=64"), preamble=STAMPED),
        "stock bfloat16": Spec(0, (*half, *in_order, FORCE)),
        "ours bfloat16": Spec(ENGINES, (*half, *in_order, FORCE)),
    }


@cache
def large_model() -> Path:
    """Write the model of LARGE_CONFIG, without weights, beside the tiny one.

    Once: servers that start read it.
    """
    small = tiny("llama")
    folder = small.with_name("cuda-check-8b")
    shutil.copytree(
        small, folder, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True
    )
    config = json.loads((small / "config.json").read_text()) | LARGE_CONFIG
    (folder / "config.json").write_text(json.dumps(config))
    return folder


class Site:
    """The servers by name.

    `logs`: a folder for their logs. `ready_s`: how long the start of one may take. `has_gpu`: they
    run on it; otherwise on the CPU.
    """

    def __init__(self, logs: Path, ready_s: float, *, has_gpu: bool) -> None:
        self.has_gpu = has_gpu
        self.logs = logs
        self.stamps = logs.with_name("stamps")
        self._ready_s = ready_s
        self._specs = specs(has_gpu=has_gpu)
        self._begun: dict[str, Begun] = {}
        self._told: set[Begun] = set()
        self._lost: dict[str, str] = {}
        self._ending: list[threading.Thread] = []
        self._count = 0

    def __getitem__(self, name: str) -> Server:
        """Return a server that a line has asked for."""
        return self._begun[name].server

    def begin(self, names: Sequence[str]) -> None:
        """See `lines.Place`."""
        for name in names:
            if name not in self._begun and name not in self._lost:
                server, names_all = self._start(name), not self._specs[name].large
                self._begun[name] = Begun(name, server, self._ready_s, names_all=names_all)

    def starts(self) -> list[Outcome]:
        """See `lines.Place`."""
        found = []
        for name, begun in list(self._begun.items()):
            if begun.outcome is None or begun in self._told:
                continue
            self._told.add(begun)
            found.append(begun.outcome)
            if begun.outcome.result is not Result.PASSED:
                self._lost[name] = begun.outcome.figure
                self._end(name)
        return found

    def starting(self) -> set[str]:
        """See `lines.Place`."""
        return {name for name, begun in self._begun.items() if begun not in self._told}

    def why_lost(self, name: str) -> str | None:
        """See `lines.Place`."""
        return self._lost.get(name)

    def end_others(self, names: Sequence[str]) -> None:
        """See `lines.Place`."""
        for name in self._begun.keys() - set(names):
            self._end(name)

    def give_up(self, names: Sequence[str]) -> None:
        """See `lines.Place`."""
        for name in names:
            _kill(self._begun[name].server)
            self._end(name)

    def end(self) -> None:
        """End all servers, and wait until they have ended."""
        self.end_others(())
        for thread in self._ending:
            thread.join()

    def _end(self, name: str) -> None:
        """Begin to end a server; it has some seconds for it."""
        thread = threading.Thread(target=self._begun.pop(name).server.stop)
        thread.start()
        self._ending.append(thread)

    def _start(self, name: str) -> Server:
        """Start a server, without waiting for it."""
        spec = self._specs[name]
        model = large_model() if spec.large else "llama"
        environment = {**ENVIRONMENT, **spec.environment}
        self._count += 1
        log = self.logs / f"{self._count:02}-{re.sub('[^A-Za-z0-9]+', '-', name)}.log"
        if spec.engines == 0:
            environment |= {"VLLM_PLUGINS": ""}
            return Server(
                model, 1, base=spec.flags, program=STOCK, environment=environment, log=log
            )
        if spec.preamble == STAMPED:
            self.stamps.mkdir(exist_ok=True)
            environment |= {"STAMPS": str(self.stamps)}
        # variables that vLLM reads at import need an interpreter of their own, and so does a GPU
        own_interpreter = bool(spec.environment) or self.has_gpu
        return Server(
            model,
            spec.engines,
            base=("--policy=manual", *spec.flags),
            program=COMMAND if own_interpreter and not spec.preamble else None,
            preamble=spec.preamble,
            environment=environment,
            log=log,
        )


def _kill(server: Server) -> None:
    """Kill all processes of a server."""
    with suppress(ProcessLookupError):
        os.killpg(server.process.pid, signal.SIGKILL)
