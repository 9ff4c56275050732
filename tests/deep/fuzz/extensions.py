"""Requests with what this server adds to vLLM's: names in `vllm_xargs`, priorities, and ids that
clients choose.
"""

from typing import Any

from hypothesis import strategies as st

from flying_serving.server.requests.xargs import DEADLINE_KEY, DEGREE_KEY, EXPECTED_KEY, SPLIT_KEY
from flying_serving.vllm_adapter.keys import OURS
from tests.deep.fuzz.bodies import encode, junk, real, text, whole
from tests.deep.fuzz.drawing import Sent

_right: dict[str, st.SearchStrategy[Any]] = {
    DEGREE_KEY: st.sampled_from([1, 2, 4]),
    DEADLINE_KEY: st.floats(0.001, 100),
    EXPECTED_KEY: st.integers(1, 300),
    SPLIT_KEY: st.integers(0, 40),
}
_wrong = whole | real | text | junk
_ours = st.dictionaries(st.sampled_from(OURS) | text, _wrong, max_size=1)
_named = st.fixed_dictionaries(
    {},
    optional={
        name: st.one_of(value, value, value, value, _wrong) for name, value in _right.items()
    },
)
xargs = st.one_of(
    _named, _named, _named, st.builds(lambda one, two: {**one, **two}, _named, _ours), junk
)
priorities = st.integers(-9, 9) | whole | junk
_id = st.sampled_from(["one", "two", "", "x" * 300]) | text
_ROUTES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/completions", {"prompt": [1, 2, 3] * 8, "max_tokens": 6}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 6}),
    ("/v1/responses", {"input": "x", "max_output_tokens": 6}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 6}),
    ("/invocations", {"prompt": [1, 2, 3], "max_tokens": 6}),
    ("/inference/v1/generate", {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 6}}),
)


@st.composite
def extended(draw: st.DrawFn, model: str) -> Sent:
    """A small request that is right in all but these fields."""
    path, right = draw(st.sampled_from(_ROUTES))
    body: dict[str, Any] = {"model": model, **right}
    extra = draw(xargs)
    if path == "/inference/v1/generate":
        body["sampling_params"] = {**right["sampling_params"], "extra_args": extra}
    else:
        body["vllm_xargs"] = extra
    if not draw(st.integers(0, 2)):
        body["priority"] = draw(priorities)
    if not draw(st.integers(0, 4)):
        body["request_id"] = draw(_id)
    if not draw(st.integers(0, 3)):
        body["stream"] = True
    ranks = st.sampled_from(["0", "1", "7", "-1", "x", "", "9" * 30])
    ids = st.sampled_from(["one", "two", "", "x" * 300])
    names = {"X-data-parallel-rank": ranks, "X-Request-Id": ids}
    headers = draw(st.fixed_dictionaries({}, optional=names)) if not draw(st.integers(0, 3)) else {}
    return Sent(path, encode(body), headers=tuple(headers.items()))
