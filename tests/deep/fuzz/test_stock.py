"""Which 5xx are put down to vLLM: those of its own checks, at their routes, and no others."""

import pytest

from tests.deep.fuzz.drawing import Sent
from tests.deep.fuzz.stock import fails_in_stock

EMPTY = '{"error":{"message":"","type":"InternalServerError"}}'
NO_TOKEN = (
    '{"error":{"message":"Internal server '
    'error","type":"InternalServerError","param":null,"code":500}}'
)
NO_FIELDS = '{"error":{"message":"\'list\' object has no attribute \'get\'"}}'


@pytest.mark.parametrize(
    ("path", "content", "status", "text", "known"),
    [
        ("/inference/v1/generate", b"{}", 500, EMPTY, False),
        ("/v1/completions", b'{"structured_outputs":[]}', 500, NO_FIELDS, True),
        ("/v1/completions", b"{}", 500, NO_FIELDS, False),
        ("/v1/completions", b'{"response_format":{},"allowed_token_ids":[1]}', 500, NO_TOKEN, True),
        ("/v1/completions", b'{"response_format":{}}', 500, NO_TOKEN, False),
        ("/v1/completions", b'{"structured_outputs":[]}', 503, NO_FIELDS, False),
    ],
)
def test_only_answers_of_vllm_are_attributed_to_vllm(
    path: str, content: bytes, status: int, text: str, known: bool
) -> None:
    """An assertion of ours that fails has an empty message too."""
    assert (fails_in_stock(Sent(path, content), status, text) is not None) is known
