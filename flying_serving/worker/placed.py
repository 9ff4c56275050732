"""The cores on which a worker's threads run.

vLLM binds workers by variables that OpenMP's library reads when a program begins: too late for a
fork. So the process is bound as a whole, before OpenMP has threads, which inherit its cores.
"""

import os
from pathlib import Path

import torch

from flying_serving.config import Deployment
from flying_serving.errors import ConfigError
from flying_serving.log import logger
from flying_serving.placement.plan import THREADS, Placement, device_name
from flying_serving.placement.topology import format_cpus
from flying_serving.start_error import told_to_server


def place_worker(deployment: Deployment, engine: int, device: int) -> None:
    """Bind this process to the deployment's placement of a device, before vLLM's worker is made,
    which binds the memory to the node of the first CPU. Raises ConfigError if the CPUs cannot be
    used any more; the server is told.
    """
    placement = deployment.placement(engine, device)
    if placement is not None:
        with told_to_server(deployment.run_dir, engine):
            apply_placement(placement)
        name = device_name(engine * deployment.devices + device, deployment.devices)
        logger.info("%s: %s", name, placement)


def apply_placement(placement: Placement) -> None:
    """Let all threads of this process, and those that they will start, run on the cores alone, and
    set the number of OpenMP threads. Raises ConfigError if the process cannot have the cores.
    """
    for thread in Path("/proc/self/task").iterdir() if placement.cpus else ():
        try:
            os.sched_setaffinity(int(thread.name), placement.cpus)
        except ProcessLookupError:
            continue  # it has ended
        except OSError as error:
            cores = format_cpus(placement.cpus)
            raise ConfigError(f"cores {cores} cannot be used: {error.strerror}") from None
    os.environ[THREADS] = str(placement.threads)
    if torch.get_num_threads() != placement.threads:
        torch.set_num_threads(placement.threads)
