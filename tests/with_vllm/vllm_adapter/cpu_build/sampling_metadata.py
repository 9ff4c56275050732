"""What vLLM's sampler is told of the requests of a step."""

import torch
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata


def metadata(rows: int, *, greedy: bool, seeded: bool, logprobs: int) -> SamplingMetadata:
    """Return what vLLM's sampler is told of so many requests."""
    generators = {row: torch.Generator().manual_seed(row) for row in range(rows) if seeded}
    return SamplingMetadata(
        temperature=None if greedy else torch.ones(rows),
        all_greedy=greedy,
        all_random=not greedy,
        top_p=None,
        top_k=None,
        generators=generators,
        max_num_logprobs=logprobs,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=torch.zeros(rows),
        presence_penalties=torch.zeros(rows),
        repetition_penalties=torch.ones(rows),
        output_token_ids=[[] for _ in range(rows)],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )
