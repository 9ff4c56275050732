"""vLLM's own schedulers over a made-up KV memory, in which steps leave what they compute."""

from collections import deque
from copy import copy
from functools import cache
from typing import Any

from vllm.config import VllmConfig
from vllm.config.lora import LoRAConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from flying_serving.config import KEY, Deployment, FlyingConfig
from flying_serving.vllm_adapter.kv.blocks import SchedulerPool
from flying_serving.vllm_adapter.request_kinds import scheduler_kinds
from flying_serving.vllm_adapter.scheduler.scheduler import lane_class
from harness.live import tiny
from tests.with_vllm.vllm_adapter.kv_configs import of_one_layer

BLOCK = 4
ALONE = Deployment(run_dir="nowhere", engines=1, devices=1, group_sizes=(1,), flying=FlyingConfig())


def config() -> VllmConfig:
    """Four requests at a time, eight tokens of them in a step. Schedulers change their limits and
    their cache's size: each has its own.
    """
    made = copy(_config())
    made.scheduler_config = copy(made.scheduler_config)
    made.cache_config = copy(made.cache_config)
    return made


@cache
def _config() -> VllmConfig:
    init_none_hash(sha256)  # as an engine does before there are requests
    args = EngineArgs(
        str(tiny("llama")), max_model_len=64, max_num_seqs=4, max_num_batched_tokens=8
    )
    return args.create_engine_config()


def token(family: int, place: int) -> int:
    """The token of a request at some place: requests of a family have the same."""
    return 100 * family + place


def make(
    name: str,
    family: int,
    prompt: int,
    outputs: int,
    *,
    had: int = 0,
    stop_at: int | None = None,
    adapter: int | None = None,
) -> Request:
    """A request, which got so many outputs elsewhere; `stop_at`: the place of the token with which
    it ends. `adapter`: the number of its adapter.
    """
    lora = None if adapter is None else LoRARequest(f"adapter {adapter}", adapter, "/a/folder")
    stop = None if stop_at is None else [token(family, stop_at)]
    params = SamplingParams(max_tokens=outputs, ignore_eos=True, stop_token_ids=stop)
    hasher = get_request_block_hasher(BLOCK, sha256)
    prompt_ids = [token(family, n) for n in range(prompt)]
    made = Request(name, prompt_ids, params, None, block_hasher=hasher, lora_request=lora)
    if had:  # as `resume` does
        made.append_output_token_ids([token(family, prompt + n) for n in range(had)])
        made.prefill_stats = None
    return made


class KVLane:
    """A scheduler, synchronous or not, and the KV memory: of what token each place has it.

    A step computes when its output is looked at, which with two of them under way is late. `kind`:
    the class that vLLM would take; `is_stock`: that one is taken, and no lane's class laid over it.
    `max_loras`: adapters that may be in a step; 0: none are served.
    """

    def __init__(
        self,
        *,
        overlaps: bool,
        blocks: int = 20,
        kind: type[Any] | None = None,
        is_stock: bool = False,
        log_stats: bool = False,
        max_loras: int = 0,
        has_prefix_cache: bool = True,
    ) -> None:
        kind = kind or (AsyncScheduler if overlaps else Scheduler)
        made = config()
        made.cache_config.num_gpu_blocks = blocks
        made.cache_config.enable_prefix_caching = has_prefix_cache
        made.lora_config = LoRAConfig(max_loras=max_loras) if max_loras else None
        made.additional_config = {KEY: ALONE}
        kind = kind if is_stock else lane_class(kind, scheduler_kinds(made))
        self.scheduler: Any = kind(
            made,
            of_one_layer(blocks, BLOCK),
            StructuredOutputManager(made),
            BLOCK,
            log_stats=log_stats,
        )
        self.overlaps = overlaps
        self.pool = SchedulerPool(self.scheduler)
        self.kv = [-1] * (BLOCK * blocks)
        self.plans: list[Any] = []
        self.prefills: dict[str, Any] = {}
        """What outputs have told of prompts, by request."""
        self._under_way: deque[tuple[Any, list[str]]] = deque()

    def free(self) -> int:
        """Blocks without a user."""
        return self.pool.free_count()

    def schedule(self) -> None:
        """Begin a step."""
        plan = self.scheduler.schedule()
        ready = [
            name
            for name in plan.num_scheduled_tokens
            if not self.scheduler.requests[name].is_prefill_chunk
        ]
        written = []
        for name, count in plan.num_scheduled_tokens.items():
            request = self.scheduler.requests[name]
            first, blocks = request.num_computed_tokens - count, self.pool.blocks_of(name)
            family = request.prompt_token_ids[0] // 100
            for place in range(first, first + count):
                written.append(
                    (BLOCK * blocks[place // BLOCK] + place % BLOCK, token(family, place))
                )
        self.plans.append(plan)
        self._under_way.append(((plan, written), ready))

    def finish(self) -> None:
        """End the oldest step."""
        (plan, written), ready = self._under_way.popleft()
        for block in plan.new_block_ids_to_zero or ():
            self.kv[BLOCK * block : BLOCK * (block + 1)] = [0] * BLOCK
        for place, value in written:
            self.kv[place] = value
        names = list(plan.num_scheduled_tokens)
        sampled = []
        for name in names:
            request = self.scheduler.requests.get(name)
            gets = name in ready and request is not None
            sampled.append(
                [token(request.prompt_token_ids[0] // 100, request.num_tokens)] if gets else []
            )
        places = {name: n for n, name in enumerate(names)}
        made = self.scheduler.update_from_output(plan, ModelRunnerOutput(names, places, sampled))
        for output in (output for of_client in made.values() for output in of_client.outputs):
            if output.prefill_stats is not None:
                assert output.request_id not in self.prefills
                self.prefills[output.request_id] = output.prefill_stats

    def step(self) -> None:
        """As vLLM's engine does: with two steps under way one is begun before the one before has
        ended.
        """
        self.schedule()
        if not self.overlaps or len(self._under_way) > 1:
            self.finish()

    def settle(self) -> None:
        """End all steps that have begun."""
        while self._under_way:
            self.finish()

    def has(self, family: int, blocks: list[int], tokens: range) -> bool:
        """Whether tokens of a family have their KV in these blocks."""
        found = [self.kv[BLOCK * blocks[place // BLOCK] + place % BLOCK] for place in tokens]
        return found == [token(family, place) for place in tokens]

    def write(self, family: int, blocks: list[int], tokens: range) -> None:
        """KV that was pulled."""
        for place in tokens:
            self.kv[BLOCK * blocks[place // BLOCK] + place % BLOCK] = token(family, place)

    def abort(self, *names: str) -> None:
        """The client ends requests."""
        self.scheduler.finish_requests(list(names), RequestStatus.FINISHED_ABORTED)
