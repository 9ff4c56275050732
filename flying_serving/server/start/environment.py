"""Variables of the environment by which vLLM or torch would run what lanes cannot share, or place
workers.
"""

from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager

from flying_serving.config import Collectives
from flying_serving.errors import ConfigError
from flying_serving.log import logger
from flying_serving.placement.plan import BIND, NOBIND

FLASHINFER = "VLLM_ALLREDUCE_USE_FLASHINFER"
_ALLOCATORS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Both names that torch reads."""
_EXPANDABLE = "expandable_segments"
# with the second vLLM takes no other value of the first than its default
_PLACING = (BIND, "VLLM_CPU_SIM_MULTI_NUMA")


def sum_without_flashinfer(
    environment: MutableMapping[str, str],
    sizes: Sequence[int],
    devices: int,
    collectives: Collectives,
) -> None:
    """Turn FlashInfer's all-reduce off where lanes of several sizes would use it.

    It has one workspace for a process, made for the first group that sums: its size, and the rank
    in it. vLLM hands that out to every other group. `sizes`: of groups, in engines. `devices`: of
    each engine.

    Raises:
        ConfigError: if a user has turned it on.
    """
    groups = [size * devices for size in sizes if size * devices > 1]
    if collectives != "nccl" or len(groups) < 2:
        return
    if environment.get(FLASHINFER, "0") != "0":
        raise ConfigError(
            f"{FLASHINFER}={environment[FLASHINFER]}: FlashInfer's all-reduce has one workspace "
            f"for a process, and this server has groups of {groups} devices; leave it unset, or "
            "fix one size by --group-sizes"
        )
    environment[FLASHINFER] = "0"
    logger.info(
        "%s=0: FlashInfer's all-reduce cannot serve groups of several sizes; groups sum by vLLM's "
        "custom all-reduce and NCCL",
        FLASHINFER,
    )


def refuse_expandable_segments(environment: MutableMapping[str, str]) -> None:
    """Refuse torch's expandable segments: peers open KV memory by CUDA IPC, and such memory has no
    handle of that kind.

    Raises:
        ConfigError: naming the variable.
    """
    for name in _ALLOCATORS:
        for setting in environment.get(name, "").split(","):
            option, _, value = setting.partition(":")
            if option.strip() == _EXPANDABLE and value.strip().lower() == "true":
                raise ConfigError(
                    f"{name}={environment[name]}: {_EXPANDABLE} must not be True, as engines open "
                    "each other's KV memory by CUDA IPC"
                )


@contextmanager
def workers_place_themselves(environment: MutableMapping[str, str]) -> Iterator[None]:
    """While the body starts engines, keep their executor, which is vLLM's, from placing workers by
    variables of OpenMP: see `Placement.bind`.
    """
    before = {name: environment.pop(name) for name in _PLACING if name in environment}
    environment[BIND] = NOBIND
    try:
        yield
    finally:
        del environment[BIND]
        environment.update(before)
