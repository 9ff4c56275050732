"""The start of one of vLLM's engines beside others that run, and its connection to their client."""

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
from flying_serving.start_error import forget_start_error


def config_of(vllm_config: Any, deployment: Deployment, blocks: int) -> Any:
    """Return the configuration of an engine that starts beside others: as theirs, with this number
    of KV blocks.
    """
    config = copy.copy(vllm_config)
    config.additional_config = {**vllm_config.additional_config, KEY: deployment.model_dump()}
    config.cache_config = copy.copy(vllm_config.cache_config)
    config.cache_config.num_gpu_blocks = None
    config.cache_config.num_gpu_blocks_override = blocks
    return config


def fork_and_handshake(
    fork: Callable[[str, Mapping[str, Any]], Any],
    client: Any,
    engine: int,
    config: Any,
    address: str,
    started: Callable[[Any], None],
) -> None:
    """Have an engine forked, and make vLLM's handshake with it until it is ready, in a thread: only
    its own end ends the wait.

    `client`: vLLM's MPClient. `fork` starts a process by its name and the arguments of
    `run_engine_core`, `started` is told that process. `address`: of the handshake, its own.

    Raises:
        RuntimeError: if it ends before it is ready.
    """
    parallel = copy.copy(config.parallel_config)
    parallel.data_parallel_size_local = 1
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
        forget_start_error(config.additional_config[KEY]["run_dir"])
        process = fork(f"EngineCore_DP{engine}", arguments)
        started(process)
        ends = [
            [socket.getsockopt(zmq.LAST_ENDPOINT).decode()]
            for socket in (client.resources.input_socket, client.resources.output_socket)
        ]
        launch = CoreEngineLaunch(None, None, EngineZmqAddresses(*ends), None, [process])
        wait_for_engine_startup(
            handshakes, [CoreEngine(engine)], parallel, False, config.cache_config, launch
        )
