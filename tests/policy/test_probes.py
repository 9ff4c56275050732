"""What a server measures at its start."""

from hypothesis import given
from hypothesis import strategies as st

from flying_serving.policy.probes import probes

COUNTS = st.integers(1, 100_000)


@given(COUNTS, COUNTS, COUNTS)
def test_probes_fit_and_each_kind_ascends(sequences: int, step_tokens: int, prompt_tokens: int) -> None:
    found = probes(sequences, step_tokens, prompt_tokens)
    decode = [probe.tokens for probe in found if not probe.is_prefill]
    prompts = [probe.tokens for probe in found if probe.is_prefill]
    assert decode == sorted(set(decode))
    assert prompts == sorted(set(prompts))
    assert 0 < max(decode) <= min(sequences, step_tokens)
    assert 0 < max(prompts) <= min(step_tokens, prompt_tokens)
