"""Teacher forcing on vLLM's V2 model runner: `--logits-processors
harness.force_v2:ForceTokens`, as `force.py` on V1.
"""

import torch
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.v1.worker.gpu.sample.logits_processor import (
    LogitsContext,
    LogitsProcessor,
    LogitsProcRequestState,
)


class ForceTokens(LogitsProcessor):
    """Leaves the next of `force_token_ids` as the only token that can be sampled; other requests
    are not touched.
    """

    follows_outputs = True

    def __init__(self, vllm_config: VllmConfig, req_states: LogitsProcRequestState) -> None:
        self._prompts = req_states.prompt_len
        self._forced: dict[int, list[int]] = {}

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        """Take in the request of a row of the batch. Return whether it is forced."""
        forced = (sampling_params.extra_args or {}).get("force_token_ids")
        self._forced[req_idx] = forced or []
        return bool(forced)

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        """Mask all of a forced request's `logits` (rows, vocab) but the token that is due."""
        indices, positions = ctx.expanded_idx_mapping.tolist(), ctx.pos.tolist()
        for row, (req_idx, position) in enumerate(zip(indices, positions, strict=True)):
            outputs = position + 1 - int(self._prompts.np[req_idx])
            if 0 <= outputs < len(self._forced[req_idx]):
                logits[row] = float("-inf")
                logits[row, self._forced[req_idx][outputs]] = 0.0
        return logits
