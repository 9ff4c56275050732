"""Where the servers of tests run: on the CPU, or all engines on one GPU (`make cuda-test`).

The variable FLYING_TESTS_ON names the place, and `Server` adds what each of its servers needs
there. Nothing of the GPU's form has run on a GPU yet.
"""

import os
from collections.abc import Sequence
from enum import StrEnum

SETTING = "FLYING_TESTS_ON"
KV_BYTES = 64 << 20
OF_ONE_GPU = {
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
"""The tests' logits processor and faults are those of the V1 runner. Stock vLLM and ours sample by
the same kernels, also where FlashInfer is not installed.
"""


class Place(StrEnum):
    """A place for servers."""

    CPU = "cpu"
    STAGED = "cpu-staged"
    """On the CPU, with the copies that engines on one GPU make."""
    ONE_GPU = "one-gpu"


def place() -> Place:
    """Return the place that FLYING_TESTS_ON names, by default the CPU.

    Raises:
        ValueError: if it names none.
    """
    name = os.environ.get(SETTING) or Place.CPU
    try:
        return Place(name)
    except ValueError:
        places = ", ".join(Place)
        raise ValueError(f"{SETTING}={name!r}: must be one of {places}") from None


def server_flags(given: Sequence[str], engines: int, where: Place) -> list[str]:
    """Return the flags of a server of ours: those that a test gives, and those of its place."""
    if where is Place.CPU:
        return list(given)
    per_device = _unless("--engines-per-device", given, engines)
    if where is Place.STAGED:
        return [*given, *per_device, *_unless("--cpu-collectives", given, "staged")]

    flags = [flag for flag in given if not flag.startswith("--cpu-")]
    flags += [*per_device, *_unless("--gpu-memory-utilization", given, 0.1)]
    flags += _unless("--kv-cache-memory-bytes", given, KV_BYTES)
    if engines > 1:
        flags += _unless("--cuda-collectives", given, "staged")
    if not _has(given, "--async-scheduling", "--no-async-scheduling"):
        flags.append("--no-async-scheduling")
    if not _has(given, "--enforce-eager", "--no-enforce-eager", "--cuda-graphs"):
        flags.append("--enforce-eager")
    return flags


def stock_flags(given: Sequence[str], where: Place) -> list[str]:
    """Return the flags of a stock server, which is on the same GPU as ours."""
    if where is not Place.ONE_GPU:
        return list(given)
    return [
        *given,
        *_unless("--gpu-memory-utilization", given, 0.1),
        *_unless("--kv-cache-memory-bytes", given, KV_BYTES),
    ]


def environment(where: Place, *, has_preamble: bool = False) -> dict[str, str]:
    """Return variables of a server. `has_preamble`: its engines need the code that ran in it."""
    if where is not Place.ONE_GPU:
        return {}
    return OF_ONE_GPU | ({"VLLM_WORKER_MULTIPROC_METHOD": "fork"} if has_preamble else {})


def _has(flags: Sequence[str], *names: str) -> bool:
    return any(flag.partition("=")[0] in names for flag in flags)


def _unless(name: str, given: Sequence[str], value: object) -> list[str]:
    """Return the flag, unless it is given."""
    return [] if _has(given, name) else [f"{name}={value}"]
