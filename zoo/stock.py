"""What stock vLLM answers, at a tensor parallel degree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zoo.architectures import MAX_MODEL_LEN
from zoo.processes import write_json
from zoo.requests import AFTER, BATCH, Request

ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": MAX_MODEL_LEN,
    "block_size": 32,
    # Above every prompt: on the CPU stock vLLM cannot take a prompt whose request has a seed in
    # chunks.
    "max_num_batched_tokens": MAX_MODEL_LEN,
    "max_num_seqs": 8,
    "kv_cache_memory_bytes": 64 << 20,
}
ENVIRONMENT = {"VLLM_PLUGINS": "", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""No plugin, ours neither; the engine in the process that asks it."""


def answer_all(path: Path, degree: int, out: Path, options: dict[str, Any]) -> None:
    """Start stock vLLM, ask it everything and write what it said. Body of a forked process, which
    it does not tidy.

    `options`: arguments of its engine beside ENGINE.
    """
    import multiprocessing

    from vllm import LLM
    from vllm.model_executor.models import registry
    from vllm.v1.executor import multiproc_executor

    # What has been imported is there after a fork, and need not be imported again by a new
    # interpreter.
    multiproc_executor.get_mp_context = lambda: multiprocessing.get_context("fork")
    registry._run_in_subprocess = lambda work: work()
    llm = LLM(model=str(path), tensor_parallel_size=degree, **ENGINE, **options)
    answers: dict[str, Any] = {}
    for requests in (BATCH, AFTER):
        answers |= _ask(llm, requests)
    write_json(out, answers)


def _ask(llm: Any, requests: tuple[Request, ...]) -> dict[str, Any]:
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": list(request.prompt)} for request in requests]
    params = [SamplingParams(**request.sampling()) for request in requests]
    done = llm.generate(prompts, params, use_tqdm=False)
    return {
        request.name: _answer(one.outputs[0]) for request, one in zip(requests, done, strict=True)
    }


def _answer(output: Any) -> dict[str, Any]:
    tokens = list(output.token_ids)
    return {
        "tokens": tokens,
        "logprobs": [
            step[token].logprob for step, token in zip(output.logprobs, tokens, strict=True)
        ],
        "top": [
            [[token, entry.logprob] for token, entry in step.items()] for step in output.logprobs
        ],
    }
