"""Flags of vLLM that have another default on CUDA, for engines that form groups."""

from typing import Any

from flying_serving.log import logger

MAX_NUM_SEQS = 256


def limit_requests(args: Any) -> None:
    """Set --max-num-seqs, unless the user has: vLLM's default on large GPUs is 1024.

    Each lane has a sampler of its own. With vLLM's V2 runner it counts outputs in 4 bytes for each
    request and token of the vocabulary. For 1024 requests and 128,000 tokens these are 0.5 GB.
    """
    from vllm.platforms import current_platform

    if args.max_num_seqs is not None or args.data_parallel_size == 1:
        return
    if not current_platform.is_cuda():
        return
    # vLLM refuses more requests than a step has tokens
    args.max_num_seqs = min(MAX_NUM_SEQS, args.max_num_batched_tokens or MAX_NUM_SEQS)
    logger.info(
        "--max-num-seqs: set to %d, as each lane has memory for that many requests",
        args.max_num_seqs,
    )
