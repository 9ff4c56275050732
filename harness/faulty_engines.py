"""Engines that end or are late, one way a function: those of servers that this process starts."""

import os
import signal
import time
from typing import Any

DEADLY, GREEDY = 77, 78
"""With `deadly_prompts`: an engine that computes a prompt with the first of these as first token
crashes; with the other one it is killed, as the kernel does for want of memory.
"""


def ends_at_each_start() -> None:
    """Engine 1 ends whenever it is started again."""
    from flying_serving.config import deployment_of
    from flying_serving.engine import core

    build = core.build

    def fail(built: Any) -> Any:
        deployment = deployment_of(built.vllm_config.additional_config)
        if built.engine_index == 1 and deployment.starts_alone:
            os._exit(3)
        return build(built)

    core.build = fail


def of_unequal_memory() -> None:
    """Engine 1 has half the KV memory of engine 0, and is ready before it."""
    from flying_serving.config import deployment_of
    from flying_serving.engine import core
    from flying_serving.worker.worker import FlyingCPUWorker

    available, build = FlyingCPUWorker.determine_available_memory, core.build

    def fewer(worker: Any) -> int:
        return int(available(worker)) // (1 + worker.engine)

    def later(built: Any) -> Any:
        found = build(built)
        deployment = deployment_of(built.vllm_config.additional_config)
        if built.engine_index == 0 and not deployment.starts_alone:
            time.sleep(3)
        return found

    FlyingCPUWorker.determine_available_memory = fewer  # type: ignore[method-assign]
    core.build = later


def deadly_prompts() -> None:
    """Prompts that begin with DEADLY or GREEDY end the engine that computes them."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    step = GPUModelRunner.execute_model
    signals = {DEADLY: signal.SIGABRT, GREEDY: signal.SIGKILL}

    def deadly(self: Any, scheduler_output: Any, intermediate_tensors: Any = None) -> Any:
        for new in scheduler_output.scheduled_new_reqs:
            if (first := (new.prompt_token_ids or [0])[0]) in signals:
                os.kill(os.getpid(), signals[first])
        return step(self, scheduler_output, intermediate_tensors)

    GPUModelRunner.execute_model = deadly
