"""Teacher forcing on vLLM's V1 runner: a custom logits processor, `--logits-processors
harness.force:ForceTokens`.

vLLM's own way, `SamplingParams.trace_decode_token_ids` with `--enable-trace-replay`, needs the V2
runner, and that one needs Triton, which the CPU build has not. A request names its tokens in
`extra_args` (`vllm_xargs` over HTTP) as `force_token_ids`. Returned logprobs stay those of the
unmodified logits (`logprobs_mode="raw_logprobs"`, the default).
"""

from collections.abc import Callable

import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

PerRequest = Callable[[list[int], torch.Tensor], torch.Tensor]


class ForceTokens(AdapterLogitsProcessor):
    """Leaves the next of `force_token_ids` as the only token that can be sampled; other requests
    are not touched.
    """

    follows_outputs = True

    def is_argmax_invariant(self) -> bool:
        """Return False: a forced token is seldom the likeliest."""
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> PerRequest | None:
        """Return the processor of one request, None if it forces nothing."""
        forced = (params.extra_args or {}).get("force_token_ids")
        if not forced:
            return None

        def force(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            """Mask all of `logits` (vocab,) but the token due after `output_ids`."""
            if len(output_ids) >= len(forced):
                return logits
            masked = torch.full_like(logits, float("-inf"))
            masked[forced[len(output_ids)]] = 0.0
            return masked

        return force
