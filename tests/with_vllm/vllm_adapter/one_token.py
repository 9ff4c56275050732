"""vLLM's asynchronous scheduler as a lane has it, where all requests get the same token again and
again: what is scheduled counts, and not what is computed.
"""

from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from flying_serving.engine.aging import Aging
from flying_serving.vllm_adapter.scheduler.scheduler import lane_class
from harness.live import tiny
from tests.with_vllm.vllm_adapter.kv_configs import of_one_layer

AGING_S = 10.0
BLOCK = 16


class OneTokenLane:
    """A scheduler that makes a step at a time. Its requests age in AGING_S."""

    def __init__(
        self,
        policy: str,
        *,
        blocks: int = 100,
        max_num_seqs: int = 1,
        step_tokens: int | None = None,
        chunk_tokens: int = 0,
    ) -> None:
        args = EngineArgs(
            str(tiny("llama")),
            max_model_len=512,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=step_tokens,
            long_prefill_token_threshold=chunk_tokens,
            scheduling_policy=policy,
            enable_prefix_caching=False,
        )
        config = args.create_engine_config()
        config.cache_config.num_gpu_blocks = blocks
        self.scheduler = lane_class(AsyncScheduler)(
            config, of_one_layer(blocks, BLOCK), StructuredOutputManager(config), BLOCK
        )
        self.aging = Aging(AGING_S)
        self.count = 0

    def arrive(
        self, request_id: str, priority: int, now_s: float, *, tokens: int = 4, outputs: int = 400
    ) -> Request:
        params = SamplingParams(max_tokens=outputs, ignore_eos=True)
        made = Request(
            request_id, [1] * tokens, params, None, arrival_time=now_s, priority=priority
        )
        self.aging.arrived(self.scheduler, request_id, now_s)
        self.scheduler.add_request(made)
        return made

    def step(self) -> set[str]:
        """Schedule and compute. Returns what was scheduled."""
        plan: SchedulerOutput = self.scheduler.schedule()
        ids = list(plan.num_scheduled_tokens)
        output = ModelRunnerOutput(ids, {name: i for i, name in enumerate(ids)}, [[7] for _ in ids])
        self.scheduler.update_from_output(plan, output)
        return set(ids)
