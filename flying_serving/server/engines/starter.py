"""The new start of a lost engine, beside the engines that run."""

import asyncio
import multiprocessing
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from vllm.v1.engine.core_client import VLLM_ENGINE_READY_TIMEOUT_S

from flying_serving.config import Deployment
from flying_serving.errors import EngineLost
from flying_serving.server.engines.processes import CleanParent, EngineProcess
from flying_serving.server.own_thread import in_own_thread
from flying_serving.vllm_adapter.processes.start import config_of, fork_and_handshake

READY_MESSAGE_S = 10.0
"""The time that an engine's first message, which says that it is ready, may be on its way."""


class EngineStarter:
    """Starts lost engines of one server again.

    `client`: vLLM's MPClient, to which an engine connects.
    `parent`: forks the process of an engine. `blocks`: KV blocks by engine.
    """

    def __init__(
        self, client: Any, parent: CleanParent, deployment: Deployment, blocks: Mapping[int, int]
    ) -> None:
        self._client = client
        self._parent = parent
        self._deployment = deployment
        self._blocks = blocks

    async def restart(
        self, engine: int, incarnations: list[int | None], started: Callable[[EngineProcess], None]
    ) -> None:
        """Start an engine again, and wait until it is ready to serve.

        `started` is told its process.

        Raises:
            EngineLost: if it is not ready in time, or ends before. Its process is killed.
        """
        client, loop = self._client, asyncio.get_running_loop()
        multiprocessing.active_children()  # reaps the process before, if this process has forked it
        changes = {"incarnations": tuple(incarnations), "starts_alone": True}
        deployment = self._deployment.model_copy(update=changes)
        config = config_of(client.vllm_config, deployment, self._blocks[engine])
        address = f"ipc://{deployment.run_dir}/start-{engine}-{incarnations[engine]}"
        processes: list[EngineProcess] = []

        def forked(process: EngineProcess) -> None:
            processes.append(process)
            # vLLM ends it with the others
            client.resources.engine_manager.processes[engine] = process
            loop.call_soon_threadsafe(started, process)

        while await client.input_socket.poll(0):  # of a start that was given up
            await client.input_socket.recv_multipart()
        fork = self._parent.fork
        start = partial(fork_and_handshake, fork, client, engine, config, address, forked)
        starting = in_own_thread(start, f"flying-start-{engine}")
        is_ready = False
        try:
            await asyncio.wait_for(starting, VLLM_ENGINE_READY_TIMEOUT_S)
            # its first message has a way of its own
            await asyncio.wait_for(client.input_socket.recv_multipart(), READY_MESSAGE_S)
            is_ready = True
        except TimeoutError:
            raise EngineLost("it was not ready in time") from None
        except RuntimeError as error:
            why = f"its process has ended before it was ready ({error})"
            raise EngineLost(why) from None
        finally:
            if not is_ready:
                for process in processes:
                    process.kill()
