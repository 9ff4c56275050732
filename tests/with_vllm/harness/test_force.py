"""ForceTokens leaves the next forced token as the only one that can be sampled."""

import math
from types import SimpleNamespace

import torch
from vllm import SamplingParams

from harness.force import ForceTokens

VOCAB = 8


def forcing(tokens: list[int] | None) -> object:
    """Return the processor of a request with these tokens to force."""
    extra = None if tokens is None else {"force_token_ids": tokens}
    config = SimpleNamespace()
    processor = ForceTokens(config, torch.device("cpu"), False)
    return processor.new_req_logits_processor(SamplingParams(extra_args=extra))


def test_each_forced_token_is_the_only_one_in_its_turn() -> None:
    force = forcing([5, 2])
    assert callable(force)
    for outputs, token in (([], 5), ([5], 2)):
        logits = force(outputs, torch.randn(VOCAB))
        assert [place for place, value in enumerate(logits) if value > -math.inf] == [token]


def test_after_the_last_forced_token_logits_are_as_they_were() -> None:
    force, logits = forcing([5]), torch.randn(VOCAB)
    assert callable(force)
    assert torch.equal(force([5], logits.clone()), logits)


def test_a_request_that_forces_nothing_has_no_processor() -> None:
    assert forcing(None) is None
    assert forcing([]) is None
