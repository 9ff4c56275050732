"""Draft tokens of n-gram speculation: a function of a request's tokens alone.

So a request that goes on in another group gets the drafts that it would have had. The steps that it
has made can be told from its tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig

from flying_serving.vllm_adapter.keys import GENERATOR_KEY
from flying_serving.vllm_adapter.speculation.draws import skip_draws
from flying_serving.vllm_adapter.speculation.ngrams import FirstPlaces

Propose = Callable[[int], Sequence[int]]
"""Returns the drafts behind the first tokens of a request. Called with their number."""

Allowed = Callable[[int, list[int]], list[int]]
"""Returns the allowed ones of a request's drafts. Called with the number of tokens before them."""


def drafts_checked(tokens: Sequence[int], prompt: int, propose: Propose) -> list[int]:
    """Return how many drafts each step of a request has checked, in its order.

    `tokens`: `prompt` tokens of its prompt, then its outputs. The first step, of the prompt, has no
    drafts. A step yields its accepted drafts and one token more, which never is the rejected draft.
    So the outputs that equal drafts were accepted.
    """
    counts, end = [0], prompt + 1
    while end < len(tokens):
        drafts = propose(end)
        counts.append(len(drafts))
        for draft in drafts:
            if end == len(tokens) or tokens[end] != draft:
                break
            end += 1
        end += 1
    return counts


class Drafter:
    """Proposes drafts as vLLM's NgramProposer and scheduler do, for requests of a VllmConfig."""

    def __init__(self, config: VllmConfig) -> None:
        # numba is imported here: only servers with speculation need it in this place
        from vllm.v1.spec_decode.ngram_proposer import (
            _find_longest_matched_ngram_and_propose_tokens,
        )

        speculative: Any = config.speculative_config
        self._least, self._most = speculative.prompt_lookup_min, speculative.prompt_lookup_max
        self._count = speculative.num_speculative_tokens
        self._find = _find_longest_matched_ngram_and_propose_tokens
        self._max_model_len = config.model_config.max_model_len
        self._vocab_size = config.model_config.get_vocab_size()
        self.propose([0] * (self._least + 1))  # compiled now

    def propose(self, tokens: Sequence[int]) -> list[int]:
        """Return the drafts behind all tokens of a request, as many as a step may check."""
        count = self._count_behind(len(tokens))
        if count <= 0:
            return []
        searched = np.array(tokens, dtype=np.int32)
        found = self._find(searched, self._least, self._most, self._max_model_len, self._count)
        drafts: list[int] = found[:count].tolist()
        return drafts

    def replay(self, tokens: Sequence[int]) -> Propose:
        """Return a function that proposes as `propose` does behind the first of these tokens. It
        searches no tokens: all n-grams are looked at here, once.
        """
        places = FirstPlaces(np.array(tokens, dtype=np.int32), self._least, self._most)

        def propose(end: int) -> list[int]:
            start, count = places.behind(end), self._count_behind(end)
            if start is None or count <= 0:
                return []
            return list(tokens[start : min(start + count, end)])

        return propose

    def _count_behind(self, tokens: int) -> int:
        """Return the most drafts of a step: the token after the last one needs a place, too."""
        return min(self._count, self._max_model_len - tokens - 1)

    def note_generator(self, request: Any, allowed: Allowed = lambda _, drafts: drafts) -> None:
        """Note for the runners the state of the generator of a request that brings outputs from
        another group, if it has a seed.

        A step with drafts draws two numbers for each token of the vocabulary. Skipping them takes
        about 1 ms for 150,000 tokens: too long for a step in which the members of a group wait.

        `allowed`: called with rising numbers of tokens. Returns the drafts that its grammar allows.
        """
        params = request.sampling_params
        if params is None or params.seed is None:
            return
        tokens = list(request.all_token_ids)
        propose = self.replay(tokens)
        checked = drafts_checked(
            tokens, request.num_prompt_tokens, lambda end: allowed(end, list(propose(end)))
        )
        generator = torch.Generator().manual_seed(params.seed)
        skip_draws(generator, len(checked), self._vocab_size, [count for count in checked if count])
        params.extra_args[GENERATOR_KEY] = generator.get_state().numpy().tobytes()


def take_drafts(lane: Any) -> Any:
    """Return vLLM's DraftTokenIds that the last step of a `DeviceLane` has proposed; None if
    there are none.
    """
    return lane.vllm_runner.take_draft_token_ids()
