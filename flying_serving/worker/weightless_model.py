"""What a model without weights tells before any engine starts: its parts, its KV blocks, and the
group sizes that it admits. Its module tree is the real one.
"""

import functools
import linecache
import logging
import multiprocessing
import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, ParamSpec, TypeVar

import torch
from torch.nn import Module
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.platforms import current_platform

from flying_serving.errors import ConfigError, FlyingError, WeightError
from flying_serving.layout.shards import lane_block_tokens
from flying_serving.memory.kv_groups import KVGroups
from flying_serving.vllm_adapter.kv.cache import block_bytes, groups_of, pooled_capacity
from flying_serving.vllm_adapter.kv.heads import fewest_kv_heads
from flying_serving.vllm_adapter.model_runner.configuration import lane_config
from flying_serving.vllm_adapter.patches import installer
from flying_serving.vllm_adapter.scheduler.limits import step_tokens
from flying_serving.vllm_adapter.weights.loading import keep_weights
from flying_serving.vllm_adapter.weights.trees import (
    LayerKind,
    first_of,
    give_data,
    kv_config,
    layer_kinds,
    module_tree,
    uncut_attention,
    world_of_one,
)
from flying_serving.weights.kinds import check_cuts, end_loading
from flying_serving.weights.share import SharedWeights

P = ParamSpec("P")
R = TypeVar("R")
CPU = torch.device("cpu")
DEADLINE_S = 300.0
"""The time to build the modules of every degree; a large model takes a few seconds."""


@dataclass(frozen=True)
class Anatomy:
    """The parts of a model. `weight_bytes`: on each device of an engine. `kinds`: see
    `layer_kinds`.
    """

    weight_bytes: int
    kinds: Mapping[LayerKind, int]


@dataclass(frozen=True)
class KVPlan:
    """The use that an engine makes of its memory for KV.

    `blocks`: one of them vLLM reserves for itself. `block_bytes`: on each device, of all layers.
    `groups`: of lane 1. `max_model_len`: the longest request, which vLLM may fit to the memory.
    `step_tokens`: most tokens of a step of a request that decodes.
    """

    blocks: int
    block_bytes: int
    groups: KVGroups
    max_model_len: int
    step_tokens: int = 1


class _BadFork:
    """The answer of a fork in which CUDA cannot be used: its parent has used it."""


def _start_methods() -> tuple[str, ...]:
    """Return how a process may be started, the fastest first: a spawned one imports all of vLLM.

    torch cannot say for certain before a fork whether this process has used CUDA.
    """
    if current_platform.is_cpu():
        return ("fork",)
    return ("spawn",) if torch.cuda.is_initialized() else ("fork", "spawn")


def apart(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function of a module, about a VllmConfig, to run in a process that ends with the
    answer.

    The VllmConfig does not change. The process has its own copy of vLLM's globals. Modules are
    built there without weights.

    Raises:
        ConfigError: if the function raises it or any other exception, or if there is no answer
            within DEADLINE_S.
    """

    @functools.wraps(function)
    def ask(*args: P.args, **options: P.kwargs) -> R:
        for method in _start_methods():
            answer = ask_in(multiprocessing.get_context(method), args, options)
            if not isinstance(answer, _BadFork):
                return answer
        raise AssertionError("a spawned process is no fork")

    def ask_in(context: Any, args: tuple[Any, ...], options: dict[str, Any]) -> R | _BadFork:
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_answer, args=(theirs, ask, args, options), daemon=True)
        process.start()
        theirs.close()
        try:
            if ours.poll(DEADLINE_S):
                answer, wrong = ours.recv()
                if wrong is not None:
                    raise ConfigError(wrong)
                found: R | _BadFork = answer
                return found
        except EOFError:
            process.join()
            raise ConfigError(
                f"--model: the process that builds the model ended with {process.exitcode}"
            ) from None
        finally:
            process.kill()
            process.join()
            ours.close()
        raise ConfigError(
            f"--model: the model was not built without weights within {DEADLINE_S:.0f} s"
        )

    return ask


def _answer(answers: Connection, ask: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Run a function in the process, and send its answer. Silent, as an engine repeats vLLM's
    output.
    """
    logging.disable()
    # a fork has none of the OpenMP threads that its parent has started, and waits for them
    torch.set_num_threads(1)
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    try:
        if torch.cuda._is_in_bad_fork():  # noqa: SLF001 - torch has no public way to ask
            answers.send((_BadFork(), None))
            os._exit(0)
        installer.install()  # a spawned process has none of the server's hooks
        answers.send((ask.__wrapped__(*args, **options), None))
    except ConfigError as error:
        answers.send((None, str(error)))
    except Exception as error:  # noqa: BLE001 - a model's constructor may raise anything
        answers.send((None, f"--model: {reason(error)}"))
    answers.close()
    os._exit(0)  # this process is a copy of the server: it must not run the server's exit handlers


@apart
def anatomy(config: VllmConfig) -> Anatomy:
    """Return the parts of a model. Raises ConfigError if it cannot be built."""
    alone = _lane(config, 1)
    with world_of_one(alone):
        tree = _tree(alone)
    weights = {id(tensor): tensor.numel() * tensor.element_size() for tensor in tree.parameters()}
    return Anatomy(sum(weights.values()), layer_kinds(tree))


@apart
def kv_plan(config: VllmConfig, available: int, widest: int) -> KVPlan:
    """Return the use that an engine would make of `available` bytes for KV on each device.

    Raises:
        ConfigError: in vLLM's words, if a group of `widest` engines does not hold the longest
            request.
    """
    alone = _lane(config, 1)
    devices = alone.parallel_config.tensor_parallel_size
    pooled = lane_block_tokens(1, widest, devices, fewest_kv_heads(alone.model_config))
    with world_of_one(alone), pooled_capacity(pooled):
        _tree(alone)
        current_platform.update_block_size_for_backend(alone)
        try:
            kv = kv_config(alone, available)
        except ValueError as error:
            raise ConfigError(" ".join(str(error).split())) from None
    return KVPlan(
        blocks=kv.num_blocks,
        block_bytes=block_bytes(kv),
        groups=groups_of(kv),
        max_model_len=alone.model_config.max_model_len,
        step_tokens=step_tokens(alone),
    )


@apart
def obstacles(config: VllmConfig, sizes: Sequence[int]) -> dict[int, str]:
    """Return why a model cannot be split over groups of some sizes, each above 1: the layer and the
    reason by size.

    Empty if vLLM cannot even build the model for one engine: an engine reports that error better.
    """
    found: dict[int, str] = {}
    with world_of_one(_lane(config, 1)):
        for size in sizes:
            try:
                lane1 = _tree(_lane(config, 1))
            except Exception:  # noqa: BLE001 - a model's constructor may raise anything
                return {}
            try:
                _share(lane1, _lane(config, size), size)
            except Exception as error:  # noqa: BLE001 - the same
                found[size] = reason(error)
    return found


def _share(lane1: Module, config: VllmConfig, size: int) -> None:
    """Share lane 1's weights with the first rank of a group of `size`. They are on the meta device
    and of no use afterwards.

    Raises:
        WeightError: naming the layer that cannot be shared, as an engine would.
        Exception: any that the model's constructor raises for this lane.
    """
    check_cuts(lane1, size)
    lane = _tree(config)
    if name := uncut_attention(lane):
        raise WeightError(f"{name}: vLLM splits its heads, and keeps its projections whole")
    give_data(lane1)
    end_loading(lane1)
    with keep_weights(), set_current_vllm_config(config):
        weights = SharedWeights(lane1, size, pack=None)
        weights.complete(lane)
        weights.bind(lane, 0, size)


def _lane(config: VllmConfig, size: int) -> VllmConfig:
    """Return the configuration of a lane of an engine by itself; engines are independent."""
    lane = lane_config(config, size, config.cache_config.block_size)
    lane.parallel_config.data_parallel_size = 1
    return lane


def _tree(config: VllmConfig) -> Module:
    """Build the modules of the first rank, on the meta device."""
    with first_of(config.parallel_config.tensor_parallel_size):
        return module_tree(config, CPU)


def reason(error: Exception) -> str:
    """Return an exception about a model in one line, with the module under construction unless the
    exception names it.
    """
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
