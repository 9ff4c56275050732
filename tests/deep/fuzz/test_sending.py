"""Which 5xx are right answers: a deadline that a request asked for, and no other."""

import pytest

from tests.deep.fuzz.drawing import Sent
from tests.deep.fuzz.sending import has_passed_its_deadline

PASSED = '{"error": {"message": "the request waited 0.0 s, longer than its queue_deadline_s"}}'
WITH_DEADLINE = b'{"vllm_xargs": {"queue_deadline_s": 0.001}}'


@pytest.mark.parametrize(
    ("content", "status", "text", "is_right"),
    [
        (WITH_DEADLINE, 504, PASSED, True),
        (b"{}", 504, PASSED, False),
        (WITH_DEADLINE, 503, PASSED, False),
        (WITH_DEADLINE, 504, "no engine answered in time", False),
    ],
)
def test_only_a_deadline_that_was_asked_for_may_pass(
    content: bytes, status: int, text: str, is_right: bool
) -> None:
    assert has_passed_its_deadline(Sent("/v1/completions", content), status, text) is is_right
