"""What a server measures at its start."""

from hypothesis import given
from hypothesis import strategies as st

from flying_serving.parallelism import Parallelism
from flying_serving.predict.probes import Probe, probes
from flying_serving.predict.steps import Step

COUNTS = st.integers(1, 100_000)


@given(COUNTS, COUNTS, COUNTS)
def test_probes_fit_and_each_kind_ascends(
    sequences: int, step_tokens: int, prompt_tokens: int
) -> None:
    found = probes(sequences, step_tokens, prompt_tokens)
    for kind in {probe.kind for probe in found}:
        sizes = [(one.tokens, one.context_tokens) for one in found if one.kind == kind]
        assert sizes == sorted(set(sizes))
        most = min(step_tokens, prompt_tokens) if kind[0] else min(sequences, step_tokens)
        for tokens, before in sizes:
            assert 0 < tokens <= most
            assert before + (tokens if kind[0] else 0) <= prompt_tokens


def test_decoding_is_measured_with_little_context_and_with_much() -> None:
    """Else nothing tells what context costs."""
    assert {probe.context_tokens for probe in probes(256, 8192, 9000) if not probe.is_prefill} == {
        16,
        1024,
    }
    assert {probe.context_tokens for probe in probes(256, 8192, 500) if not probe.is_prefill} == {
        16,
        500,
    }


def test_a_piece_of_a_prompt_is_measured_with_much_before_it() -> None:
    """Else nothing tells what long prompts cost."""
    for room, before in (
        (1_000_000, [8192, 32_768, 131_072, 524_288]),
        (100_000, [8192, 32_768]),
        (9000, [8192]),
        (1000, [744]),
        (2, [1]),
    ):
        pieces = [one for one in probes(256, 8192, room) if one.is_prefill and one.context_tokens]
        assert [one.context_tokens for one in pieces] == before
        assert len({one.kind for one in pieces}) == 1
        for piece in pieces:
            step = Step.of_probe(1, 0.5, piece.tokens, piece.is_prefill, piece.context_tokens)
            assert step.prefill_pairs == piece.context_tokens * step.prefill_tokens


def test_groups_of_several_measure_probes_of_64_tokens_and_more_both_ways() -> None:
    """Prompts and decoding requests; an engine alone has nobody to divide them with."""
    for is_prefill in (False, True):
        for tokens, size, divides in ((63, 8, False), (64, 8, True), (64, 2, True), (64, 1, False)):
            probe = Probe(tokens, is_prefill, 16)
            assert probe.measures(size, Parallelism.TENSOR)
            assert probe.measures(size, Parallelism.TOKEN) == divides
