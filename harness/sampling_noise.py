"""The noise with which vLLM's sampler for the CPU chooses a token of a seeded request."""

from __future__ import annotations

LARGEST = 64.0
"""Beyond the difference of any two tokens' noise."""
NEVER = -1e30
BISECTIONS = 50


def noise_lead(seed: int, step: int, token: int, other: int) -> float:
    """Return by how much the noise of a token exceeds another's.

    vLLM's operation says only which token is the largest, so the difference is found by bisection.

    Args:
        seed: of the request.
        step: the number of tokens that it has sampled before.
    """
    import torch
    import vllm._custom_ops  # noqa: F401 - loads the operation

    generator = torch.Generator().manual_seed(seed)
    for _ in range(step + 1):
        drawn = torch.randint(0, 2**31, (1,), generator=generator, dtype=torch.long)
    low, high = -LARGEST, LARGEST
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        logits = torch.full((1, max(token, other) + 1), NEVER)
        logits[0, token], logits[0, other] = 0.0, middle
        if int(torch.ops._C.fused_gumbel_argmax(logits, drawn)) == token:
            low = middle
        else:
            high = middle
    return low
