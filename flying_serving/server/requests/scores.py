"""The comparison of an output's tokens with the logprobs that its request asked for.

vLLM's API server joins tokens and logprobs when a request ends. A step that lacks logprobs, or has
those of another token, then raises a KeyError that names neither.
"""

from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput


def why_unscored(output: EngineCoreOutput, params: SamplingParams | None) -> str | None:
    """Return in which tokens an output and its logprobs differ.

    None if they do not, or if `params` asks for no logprobs, or for those of the whole vocabulary.
    """
    tokens = output.new_token_ids
    if not tokens or params is None or params.num_logprobs in (None, -1):
        return None
    logprobs = output.new_logprobs
    if logprobs is None:
        return f"an output with tokens {tokens} has no logprobs"
    of_logprobs = logprobs.logprob_token_ids[:, 0].tolist()
    if of_logprobs != tokens:
        return f"an output with tokens {tokens} has logprobs of tokens {of_logprobs}"
    return None
