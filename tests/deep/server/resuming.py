"""Engines with lanes and vLLM's plain client: requests go where they are sent, with the history
that they are given.

The child process of test_history.py. JOBS is a JSON list, each job with "prompt", "sampling" (of
SamplingParams) and "lane"; "after" is [number of an earlier job, k]: the history is the first k
tokens that it got. OUT gets for each job the tokens and logprobs that the engine gave out, and how
it ended.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any, NoReturn

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core_client import AsyncMPClient
from vllm.v1.engine.input_processor import InputProcessor

from flying_serving.config import KEY, deployment_of
from flying_serving.engine.core import FlyingEngineCore
from flying_serving.server.patches import HOOKS
from flying_serving.server.start.launch import prepare
from flying_serving.vllm_adapter.api_server.client import starting
from flying_serving.vllm_adapter.keys import HISTORY_KEY, LANE_KEY
from flying_serving.vllm_adapter.patches import installer, table
from harness.place import Place, place

ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 1024,
    "block_size": 32,
    "max_num_batched_tokens": 128,
    "max_num_seqs": 8,
    "kv_cache_memory_bytes": 16 << 20,
    "logits_processors": ["harness.force:ForceTokens"],
    "data_parallel_size": 2,
    "additional_config": {KEY: {"group_sizes": [1, 2]}},
}


OF_ONE_GPU: dict[str, Any] = {
    "gpu_memory_utilization": 0.1,
    "async_scheduling": False,
    "additional_config": {KEY: {"group_sizes": [1, 2], "engines_per_device": 2}},
}


def start(model: str) -> tuple[AsyncMPClient, InputProcessor]:
    """Start two engines, as `make_client` does, under vLLM's own client."""
    settings = ENGINE | (OF_ONE_GPU if place() is Place.ONE_GPU else {})
    config = AsyncEngineArgs(model=model, **settings).create_engine_config()
    installer.install(table.PATCHES)
    installer.install(table.SERVER_PATCHES, HOOKS)
    executor_class = prepare(config, 1)
    with starting(deployment_of(config.additional_config).run_dir, FlyingEngineCore):
        return AsyncMPClient(config, executor_class, log_stats=True), InputProcessor(config)


async def answer(
    client: AsyncMPClient,
    inputs: InputProcessor,
    number: int,
    job: dict[str, Any],
    history: list[int],
) -> dict[str, Any]:
    """Send one request to engine 0 and collect what it gives out."""
    fields = dict(job["sampling"])
    if "regex" in fields:
        fields["structured_outputs"] = StructuredOutputsParams(regex=fields.pop("regex"))
    request = inputs.process_inputs(
        f"job-{number}",
        {"prompt_token_ids": job["prompt"]},
        SamplingParams(**fields),
        ("generate",),
    )
    assert request.sampling_params is not None
    ours = {LANE_KEY: job["lane"]} | ({HISTORY_KEY: history} if history else {})
    request.sampling_params.extra_args = (request.sampling_params.extra_args or {}) | ours
    await client._send_input(EngineCoreRequestType.ADD, request, client.core_engines[0])
    got: dict[str, Any] = {"tokens": [], "logprobs": [], "events": 0, "prefills": 0}
    while True:
        for output in (await client.get_output_async()).outputs:
            assert output.request_id == request.request_id
            got["tokens"] += output.new_token_ids
            got["events"] += len(output.events or ())
            got["prefills"] += output.prefill_stats is not None
            if output.new_logprobs is not None:
                got["logprobs"] += [float(row[0]) for row in output.new_logprobs.logprobs]
            if output.finish_reason is not None:
                return got | {"finish": str(output.finish_reason), "stop": output.stop_reason}


async def answer_all(model: str, jobs: str, out: str) -> None:
    """Answer all jobs, one after the other; the engines end with this process."""
    client, inputs = start(model)
    answers: list[dict[str, Any]] = []
    try:
        for number, job in enumerate(json.loads(Path(jobs).read_text())):
            before, count = job.get("after", (0, 0))
            history = answers[before]["tokens"][:count] if count else []
            answers.append(await answer(client, inputs, number, job, history))
        checked = [
            await client._call_utility_async("flying_check", engine=engine)
            for engine in client.core_engines
        ]
        assert all(checked)
        Path(out).write_text(json.dumps(answers))
    finally:
        client.shutdown()


def main(model: str, jobs: str, out: str) -> NoReturn:
    """Answer all jobs and end the process."""
    asyncio.run(answer_all(model, jobs, out))
    sys.exit()
