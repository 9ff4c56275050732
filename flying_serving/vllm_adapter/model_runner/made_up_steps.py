"""Steps of made-up requests, as vLLM's scheduler would order them: with attention, KV memory and
sampling.
"""

from collections.abc import Iterator
from typing import Any

from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.tasks import PoolingTask
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput

from flying_serving.memory.kv_groups import KVGroups

_TOKEN = 1
CHECK_REQUESTS = 8
_CHECK_CHUNKS = (5, 3)
"""Tokens of each request in the steps of a check: the second chunk reads the first one's KV."""
CHECK_TOKENS = max(_CHECK_CHUNKS)


def prefill_steps(
    count: int, tokens: int, before: int, groups: KVGroups
) -> Iterator[SchedulerOutput]:
    """Yield `count` steps that each compute the last `tokens` of a prompt, and a last one that only
    ends them.

    Each has `before` tokens before them.
    """
    names = [f"calibration-prefill-{tokens}-{before}-{i}" for i in range(count)]
    for name in names:
        yield _step([_new(name, before + tokens, before, before + tokens, groups)], {name: tokens})
    yield _end(names)


def decode_steps(
    count: int, sequences: int, context: int, groups: KVGroups
) -> Iterator[SchedulerOutput]:
    """Yield `count` steps in which `sequences` requests decode a token each, and a last one that
    ends them.

    After the last of the `count` steps each request has `context` tokens, at least `count`.
    """
    names = [f"calibration-decode-{sequences}-{context}-{i}" for i in range(sequences)]
    each = dict.fromkeys(names, 1)
    prompt = context - count + 1
    yield _step([_new(name, prompt, prompt - 1, context, groups) for name in names], each)
    for number in range(1, count):
        yield _next_step(each, computed=prompt - 1 + number, outputs=number)
    yield _end(names)


def check_steps(
    requests: int, vocabulary: int, groups: KVGroups, decodes: int = 0, variant: Any = None
) -> Iterator[SchedulerOutput]:
    """Yield a few short prompts, computed in two chunks, `decodes` steps of a token each, and a
    step that ends them.

    Each request has a KV block of each group to itself, which holds all its tokens. Those of its
    prompt are spread over the vocabulary. With `decodes` its outputs are the likeliest tokens.
    Every other request is for `variant` of the model, vLLM's LoRARequest, if there is one.
    """
    names = [f"check-{i}" for i in range(requests)]
    length = sum(_CHECK_CHUNKS)
    assert length + decodes <= groups.block_tokens
    stride = vocabulary / (requests * length)
    new = []
    for i, name in enumerate(names):
        request = _new(name, length, 0, length, groups)
        prompt = [int((i + j * requests + 0.5) * stride) for j in range(length)]
        request.prompt_token_ids = request.prefill_token_ids = prompt
        request.block_ids = groups.made_up(length, first=1 + i * len(groups.groups))
        request.lora_request = variant if i % 2 else None
        if decodes:
            request.sampling_params = SamplingParams(max_tokens=1 + decodes, temperature=0.0)
        new.append(request)
    first, second = _CHECK_CHUNKS
    yield _step(new, dict.fromkeys(names, first))
    yield _next_step(dict.fromkeys(names, second), computed=first, outputs=0)
    for number in range(decodes):
        yield _next_step(dict.fromkeys(names, 1), computed=length + number, outputs=1 + number)
    yield _end(names)


def without_outputs(plan: SchedulerOutput, task: PoolingTask) -> SchedulerOutput:
    """Change the new requests of a step into requests of a pooling model. Returns the step."""
    for request in plan.scheduled_new_reqs:
        request.sampling_params, request.pooling_params = None, PoolingParams(task=task)
    return plan


def _new(name: str, prompt: int, computed: int, tokens: int, groups: KVGroups) -> NewRequestData:
    # All requests have the same blocks: none has an owner yet, and their contents do not matter.
    # Block 0 is vLLM's.
    token_ids = [_TOKEN] * prompt
    return NewRequestData(
        req_id=name,
        prompt_token_ids=token_ids,
        mm_features=[],
        sampling_params=SamplingParams(max_tokens=tokens),  # drawn, as is the default of a request
        pooling_params=None,
        block_ids=groups.made_up(tokens),
        num_computed_tokens=computed,
        lora_request=None,
        prefill_token_ids=token_ids,  # read by the V2 model runner alone
    )


def _step(new: list[NewRequestData], scheduled: dict[str, int]) -> SchedulerOutput:
    plan = SchedulerOutput.make_empty()
    plan.scheduled_new_reqs = new
    plan.num_scheduled_tokens = scheduled
    plan.total_num_scheduled_tokens = sum(scheduled.values())
    return plan


def _next_step(scheduled: dict[str, int], *, computed: int, outputs: int) -> SchedulerOutput:
    """Return a step of running requests, each with `computed` tokens computed and `outputs` tokens
    sampled before.
    """
    plan = _step([], scheduled)
    cached = plan.scheduled_cached_reqs
    cached.req_ids = list(scheduled)
    cached.new_block_ids = [None] * len(scheduled)
    cached.num_computed_tokens = [computed] * len(scheduled)
    cached.num_output_tokens = [outputs] * len(scheduled)
    return plan


def _end(names: list[str]) -> SchedulerOutput:
    plan = SchedulerOutput.make_empty()
    plan.finished_req_ids = set(names)
    return plan
