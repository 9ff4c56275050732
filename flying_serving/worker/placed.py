"""The placement of a worker: the cores on which its process's threads run.

vLLM places workers by variables of OpenMP. Its library reads them when a program begins, and a fork
has the parent's values. So the process is bound as a whole, before it has a pool of OpenMP threads.
The threads that the library starts, also later ones, inherit the cores of the thread that starts
them.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from flying_serving.config import Deployment
from flying_serving.errors import ConfigError
from flying_serving.log import logger
from flying_serving.placement.plan import Placement, device_name
from flying_serving.placement.topology import format_cpus
from flying_serving.placement.wishes import THREADS
from flying_serving.start_error import told_to_server

_POLICIES = Path("/proc/self/numa_maps")


@contextmanager
def placed(deployment: Deployment, engine: int, device: int) -> Iterator[None]:
    """Bind this process to the deployment's placement of a device, before the body makes vLLM's
    worker.

    The worker binds the memory to the node of the first CPU that it may use. The outcome is logged.

    Raises:
        ConfigError: if the CPUs cannot be used any more; the server is told.
    """
    placement = deployment.placement(engine, device)
    if placement is None:
        yield
        return
    with told_to_server(deployment.run_dir, engine):
        apply_placement(placement)
    yield
    name = device_name(engine * deployment.devices + device, deployment.devices)
    logger.info("%s: %s", name, describe_placement(placement))


def apply_placement(placement: Placement) -> None:
    """Give this process its cores and its number of OpenMP threads. Raises ConfigError if it cannot
    have them.
    """
    if placement.cpus:
        _bind(placement.cpus)
    os.environ[THREADS] = str(placement.threads)
    if torch.get_num_threads() != placement.threads:
        torch.set_num_threads(placement.threads)


def describe_placement(placement: Placement) -> str:
    """Return the placement in words: the cores, the threads and the policy of memory that this
    process really has.
    """
    cpus = tuple(sorted(os.sched_getaffinity(0))) if placement.cpus else ()
    found = placement.model_copy(update={"cpus": cpus, "threads": torch.get_num_threads()})
    policy, _, nodes = memory_policy().partition(":")
    return found.with_memory(
        f"bound to node {nodes}" if policy.startswith("bind") else f"not bound ({policy})"
    )


def memory_policy() -> str:
    """Return where new pages of this process lie, in the kernel's words: like bind:0, or
    default.
    """
    try:
        with _POLICIES.open(encoding="ascii") as maps:
            return maps.readline().split()[1]
    except OSError:
        return "unknown"


def _bind(cpus: tuple[int, ...]) -> None:
    """Let every thread of this process, and the threads that they will start, run on these CPUs
    alone.
    """
    for thread in Path("/proc/self/task").iterdir():
        try:
            os.sched_setaffinity(int(thread.name), cpus)
        except ProcessLookupError:
            continue  # it has ended
        except OSError as error:
            raise ConfigError(
                f"cores {format_cpus(cpus)} cannot be used: {error.strerror}"
            ) from None
