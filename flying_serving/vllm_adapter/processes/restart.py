"""The new start of one of vLLM's engines, beside others that run, and its connection to their
client.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import zmq
from vllm.utils.network_utils import make_zmq_socket
from vllm.v1.engine.utils import (
    CoreEngine,
    CoreEngineLaunch,
    EngineZmqAddresses,
    wait_for_engine_startup,
)

from flying_serving.config import KEY, Deployment
from flying_serving.errors import EngineLost
from flying_serving.start_error import forget_start_error


def again(vllm_config: Any, deployment: Deployment, blocks: int) -> Any:
    """Return the configuration of an engine that is started again: as at first, with the same
    number of KV blocks.
    """
    config = copy.copy(vllm_config)
    config.additional_config = {**vllm_config.additional_config, KEY: deployment.model_dump()}
    config.cache_config = copy.copy(vllm_config.cache_config)
    config.cache_config.num_gpu_blocks = None
    config.cache_config.num_gpu_blocks_override = blocks
    return config


def start(
    fork: Callable[[str, Mapping[str, Any]], Any],
    client: Any,
    engine: int,
    config: Any,
    started: Callable[[Any], None],
) -> None:
    """Start an engine and wait until it is ready, in a thread: only its own end ends the wait.

    `client`: vLLM's MPClient. `fork` starts a process by its name and the arguments of
    `run_engine_core`, `started` is told that process.

    Raises:
        EngineLost: if it ends before it is ready.
    """
    parallel = copy.copy(config.parallel_config)
    parallel.data_parallel_size_local = 1
    run_dir, number = (
        config.additional_config[KEY]["run_dir"],
        config.additional_config[KEY]["incarnations"][engine],
    )
    address = f"ipc://{run_dir}/start-{engine}-{number}"
    with (
        zmq.Context() as context,
        make_zmq_socket(context, address, zmq.ROUTER, bind=True) as handshakes,
    ):
        arguments = {
            "vllm_config": config,
            "local_client": True,
            "handshake_address": address,
            "executor_class": client.flying_executor_class,
            "log_stats": client.flying_log_stats,
            "tensor_queue": None,
            "dp_rank": engine,
            "local_dp_rank": engine,
        }
        forget_start_error(run_dir)
        process = fork(f"EngineCore_DP{engine}", arguments)
        started(process)
        ends = [
            [socket.getsockopt(zmq.LAST_ENDPOINT).decode()]
            for socket in (client.resources.input_socket, client.resources.output_socket)
        ]
        launch = CoreEngineLaunch(None, None, EngineZmqAddresses(*ends), None, [process])
        try:
            wait_for_engine_startup(
                handshakes, [CoreEngine(engine)], parallel, False, config.cache_config, launch
            )
        except RuntimeError as error:
            raise EngineLost(f"its process has ended before it was ready ({error})") from None
