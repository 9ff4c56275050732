"""Which group sizes a model admits: asked of its real module tree, without weights and before any engine starts."""

from __future__ import annotations

import linecache
import logging
import multiprocessing
import os
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.platforms import current_platform

from flying_serving.engine.lane import lane_config
from flying_serving.errors import ConfigError, FlyingError
from flying_serving.vllm_hooks.trees import first_of, module_tree, world_of_one
from flying_serving.weights.cuts import check_cuts

CPU = torch.device("cpu")
DEADLINE_S = 300.0
"""For building the modules of every degree; a large model takes a few seconds."""


def obstacles(config: VllmConfig, sizes: Sequence[int]) -> dict[int, str]:
    """Why a model cannot be split over groups of some sizes, in a process of its own that ends with the answer.

    Args:
        config: the server's, as vLLM has made it from its flags. It stays as it is.
        sizes: engines per group, each above 1.

    Returns:
        for each size that the model does not admit, the layer and the reason. Empty if vLLM cannot even build the
        model for one engine: that error is better told by an engine.

    Raises:
        ConfigError: if there is no answer within DEADLINE_S, or an error in its place.
    """
    found: dict[int, str] = _apart(examine, config, tuple(sizes)) if sizes else {}
    return found


def weight_bytes(config: VllmConfig) -> int:
    """Bytes of the parameters on each device of an engine; the model is built without weights, as in `obstacles`.

    Raises:
        ConfigError: if the model cannot be built, or there is no answer within DEADLINE_S.
    """
    found: int = _apart(count_bytes, config)
    return found


def _apart(function: Callable[..., Any], *args: Any) -> Any:
    """What a function returns in a process of its own, which ends with the answer."""
    context: Any = multiprocessing.get_context("fork" if current_platform.is_cpu() else "spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(theirs, function, args), daemon=True)
    process.start()
    theirs.close()
    try:
        if ours.poll(DEADLINE_S):
            answer, wrong = ours.recv()
            if wrong is not None:
                raise ConfigError(f"--model: {wrong}")
            return answer
    except EOFError:
        process.join()
        raise ConfigError(f"--model: the process that builds the model ended with {process.exitcode}") from None
    finally:
        process.kill()
        process.join()
        ours.close()
    raise ConfigError(f"--model: the model was not built without weights within {DEADLINE_S:.0f} s")


def _answer(answers: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Body of the process. What vLLM says while it builds modules, an engine will say again."""
    logging.disable()
    torch.set_num_threads(1)  # a fork has none of the OpenMP threads that its parent has started, and waits for them
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    try:
        answers.send((function(*args), None))
    except Exception as error:  # noqa: BLE001 - whatever a model's constructor raises
        answers.send((None, reason(error)))
    answers.close()
    os._exit(0)  # nothing of the server's, whose copy this process is, may be ended here


def count_bytes(config: VllmConfig) -> int:
    """What `weight_bytes` returns; in this process, which must be in no torch world."""
    alone = _alone(config)
    with world_of_one(alone), first_of(config.parallel_config.tensor_parallel_size):
        parameters = {id(tensor): tensor for tensor in module_tree(alone, CPU).parameters()}
    return sum(tensor.numel() * tensor.element_size() for tensor in parameters.values())


def examine(config: VllmConfig, sizes: Sequence[int]) -> dict[int, str]:
    """What `obstacles` returns; in this process, which must be in no torch world."""
    devices = config.parallel_config.tensor_parallel_size
    alone = _alone(config)
    found: dict[int, str] = {}
    with world_of_one(alone):
        try:
            with first_of(devices):
                lane1 = module_tree(alone, CPU)
        except Exception:  # noqa: BLE001 - whatever a model's constructor raises
            return {}
        for size in sizes:
            try:
                check_cuts(lane1, size)
                with first_of(devices * size):
                    module_tree(lane_config(alone, size, alone.cache_config.block_size), CPU)
            except Exception as error:  # noqa: BLE001 - the same
                found[size] = reason(error)
    return found


def _alone(config: VllmConfig) -> VllmConfig:
    """The configuration of an engine by itself; engines are independent."""
    alone = lane_config(config, 1, config.cache_config.block_size)
    alone.parallel_config.data_parallel_size = 1
    return alone


def reason(error: Exception) -> str:
    """What an exception says of a model, in one line; with the module that was being built, if it does not name it."""
    text = " ".join(str(error).split())
    if isinstance(error, FlyingError):
        return text
    where, line = "", ""
    for frame, number in traceback.walk_tb(error.__traceback__):
        prefix = frame.f_locals.get("prefix")  # every module of vLLM is built with its name
        where = prefix if isinstance(prefix, str) and prefix else where
        line = linecache.getline(frame.f_code.co_filename, number).strip()
    text = text or f"{type(error).__name__} at `{line}`"
    return f"{where}: {text}" if where else text
