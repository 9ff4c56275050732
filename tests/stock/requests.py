"""The fixed requests that stock vLLM and the lanes both answer, over token ids below 512, the
smallest vocabulary.
"""

import hashlib
import random
from dataclasses import dataclass, replace
from typing import Any

VOCAB = 512


@dataclass(frozen=True)
class StockRequest:
    """One request: `forced` is empty for a sampled request, else the tokens that it must emit
    (teacher forcing).
    """

    name: str
    prompt: tuple[int, ...]
    max_tokens: int
    seed: int | None
    forced: tuple[int, ...] = ()

    def sampling(self) -> dict[str, Any]:
        """Return the keyword arguments of vLLM's SamplingParams: temperature 1, the logprob of each
        token.
        """
        return {
            "temperature": 1.0,
            "seed": self.seed,
            "max_tokens": self.max_tokens,
            "ignore_eos": True,
            "logprobs": 0,
            "extra_args": {"force_token_ids": list(self.forced)} if self.forced else None,
        }


def shortened(request: StockRequest, most_tokens: int) -> StockRequest:
    """Return a request that ends after `most_tokens` tokens, if it is longer."""
    count = min(request.max_tokens, most_tokens)
    return replace(request, max_tokens=count, forced=request.forced[:count])


def tokens(seed: int, count: int) -> tuple[int, ...]:
    """Return `count` random token ids."""
    draw = random.Random(seed)
    return tuple(draw.randrange(VOCAB) for _ in range(count))


LONG = tokens(4, 700)

# On CPU stock vLLM dies ("CPU Generator does not use offset") when it prefills a request that has a
# seed in more than one chunk, because it rewinds the generator as on CUDA. So the recorder prefills
# every seeded prompt in one chunk, and only a forced one, which needs no seed, in two. A server
# that chunks more finely has to give the same tokens. "prefix" finds 16 blocks of "long" in the
# prefix cache.  The seeds are such that, in every model recorded, the token sampled leads the next
# by more than 1e-3 (in logits plus noise) at each step; degrees and machines differ by about 2e-5.
SAMPLED = (
    StockRequest("short", tokens(1, 5), 48, seed=11),
    StockRequest("block", tokens(2, 33), 48, seed=26),
    StockRequest("blocks", tokens(3, 100), 40, seed=13),
    StockRequest("chunks", tokens(5, 257), 32, seed=14),
    StockRequest("long", LONG, 32, seed=15),
    StockRequest("prefix", LONG[:530] + tokens(6, 110), 24, seed=16),
)
FORCED = (
    StockRequest("forced-short", tokens(7, 17), 48, seed=None, forced=tokens(8, 48)),
    StockRequest("forced-long", tokens(9, 1100), 40, seed=None, forced=tokens(10, 40)),
)
REQUESTS = SAMPLED + FORCED


def requests_hash() -> str:
    """Return a hash of all requests, so that a recording of others is noticed."""
    return hashlib.sha256(repr(REQUESTS).encode()).hexdigest()[:16]
