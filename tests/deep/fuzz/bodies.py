"""Bodies of requests, drawn from vLLM's own request schemas and from what JSON can hold besides."""

import json
from typing import Any

from hypothesis import strategies as st
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest
from vllm.sampling_params import SamplingParams

from tests.deep.fuzz.drawing import JSON, Sent

_DEEP = "nested so deeply"


_characters = st.characters(codec=None, categories=None, exclude_categories=()) | st.sampled_from(
    "\ud800\udfff\0\n{}"
)
text = st.text(_characters, max_size=8) | st.sampled_from(["", "x", "\ud800", "x" * 5000])
whole = st.integers(-3, 20) | st.sampled_from(
    [
        sign * (2**power + off)
        for sign in (1, -1)
        for power in (31, 32, 63, 64, 100, 1200)
        for off in (-1, 0, 1)
    ]
)
real = st.floats(-3, 3) | st.sampled_from(
    [float("nan"), float("inf"), float("-inf"), 1e308, -1e308, 5e-324]
)
_deep = st.sampled_from([40, 300, 900, 990, 3000, 100_000]).map(lambda depth: f"{_DEEP} {depth}")
_leaf = st.none() | st.booleans() | whole | real | text | _deep
junk = st.recursive(
    _leaf,
    lambda some: st.lists(some, max_size=4) | st.dictionaries(text, some, max_size=3),
    max_leaves=6,
)
_tokens = st.lists(st.integers(0, 511), min_size=1, max_size=12)
_ids = _tokens | st.lists(whole, max_size=4)
extra = st.dictionaries(
    st.sampled_from(
        [
            "tp_degree",
            "queue_deadline_s",
            "expected_tokens",
            "split_at",
            "flying_lane",
            "flying_offer",
            "session_id",
        ]
    )
    | text,
    st.sampled_from([1, 2, 3, 0.001, True]) | junk,
    max_size=3,
)
_constraint = st.fixed_dictionaries(
    {},
    optional={
        "json": st.sampled_from(['{"type": "object"}', '{"type": 1}', "{"]) | junk,
        "regex": st.sampled_from(["a*", "(", "[0-9]{2,99999}", "\ud800"]) | junk,
        "choice": st.lists(text, max_size=3) | junk,
        "grammar": st.sampled_from(['root ::= "a"', "root ::="]) | junk,
        "json_object": st.booleans() | junk,
        "structural_tag": junk,
    },
)
_message = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["user", "system", "assistant", "tool"]) | text,
        "content": text | junk,
    },
    optional={"name": junk, "tool_calls": junk},
)
_tool = st.fixed_dictionaries(
    {
        "type": st.just("function") | junk,
        "function": st.fixed_dictionaries({"name": text, "parameters": junk}),
    }
)

LIKELY: dict[str, st.SearchStrategy[Any]] = {
    "prompt": text | _ids | st.lists(_tokens, max_size=3) | st.lists(text, max_size=3),
    "messages": st.lists(_message, max_size=3),
    "token_ids": _ids,
    "max_tokens": st.integers(1, 30),
    "max_completion_tokens": st.integers(1, 30),
    "min_tokens": st.integers(0, 40),
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0, 1),
    "top_k": st.integers(-1, 600),
    "n": st.integers(1, 4),
    "stop": text | st.lists(text, max_size=3),
    "stop_token_ids": _ids,
    "logprob_token_ids": _ids,
    "prompt_logprob_token_ids": st.lists(_ids, max_size=3),
    "bad_words": st.lists(text, max_size=3),
    "allowed_token_ids": _ids,
    "logit_bias": st.dictionaries(text | st.integers(0, 600).map(str), real, max_size=3),
    "logprobs": st.integers(-1, 5) | st.booleans(),
    "top_logprobs": st.integers(-1, 5),
    "prompt_logprobs": st.integers(-1, 5),
    "echo": st.booleans(),
    "stream": st.booleans(),
    "stream_options": st.fixed_dictionaries({"include_usage": st.booleans() | junk}),
    "priority": st.integers(-9, 9),
    "seed": st.integers(0, 99),
    "ignore_eos": st.booleans(),
    "vllm_xargs": extra,
    "extra_args": extra,
    "kv_transfer_params": st.dictionaries(text, junk, max_size=2),
    "ec_transfer_params": st.dictionaries(text, junk, max_size=2),
    "structured_outputs": _constraint,
    "response_format": st.sampled_from([{"type": "json_object"}, {"type": "text"}])
    | st.fixed_dictionaries({"type": st.just("json_schema") | junk, "json_schema": junk}),
    "tools": st.lists(_tool, max_size=2),
    "tool_choice": st.sampled_from(["auto", "none", "required"]) | junk,
    "chat_template_kwargs": st.dictionaries(text, junk, max_size=2),
    "repetition_detection": st.fixed_dictionaries({"max_pattern_size": whole, "min_count": whole}),
    "truncate_prompt_tokens": st.integers(-1, 20),
}
"""By the name of a field: values that are more often right than wrong."""

_SHORT = {"max_tokens": 6}
_ROUTES: tuple[tuple[str, dict[str, Any], tuple[str, ...]], ...] = (
    ("/v1/completions", {"prompt": "x", **_SHORT}, tuple(CompletionRequest.model_fields)),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "x"}], **_SHORT},
        tuple(ChatCompletionRequest.model_fields),
    ),
    ("/inference/v1/generate", {"token_ids": [1, 2]}, tuple(GenerateRequest.model_fields)),
)
_SAMPLING = tuple(name for name in SamplingParams.__struct_fields__ if not name.startswith("_"))


def _values(draw: st.DrawFn, names: tuple[str, ...], most: int) -> dict[str, Any]:
    known = [name for name in names if name in LIKELY]
    chosen = draw(st.lists(st.sampled_from(known), max_size=most, unique=True))
    values = {name: draw(LIKELY[name] if draw(st.integers(0, 7)) else junk) for name in chosen}
    if not draw(st.integers(0, 3)):
        values[draw(st.sampled_from(names))] = draw(junk)
    return values


@st.composite
def requests(draw: st.DrawFn, model: str) -> Sent:
    """A request that is right but for some of its fields, for its form, or not at all."""
    path, right, names = draw(st.sampled_from(_ROUTES))
    body: Any = {"model": model, **right, **_values(draw, names, 5)}
    if path == "/inference/v1/generate":
        params = {**_SHORT, **_values(draw, _SAMPLING, 4)}
        body["sampling_params"] = draw(junk) if not draw(st.integers(0, 9)) else params
    if not draw(st.integers(0, 9)):
        body.pop(draw(st.sampled_from(sorted(body))))
    if not draw(st.integers(0, 29)):
        body = draw(junk)
    content = encode(body)
    form = draw(st.integers(0, 39))
    if form == 0:
        content = content[: draw(st.integers(0, len(content)))]
    if form == 1:
        content = draw(st.binary(max_size=40))
    content_type = (
        draw(st.sampled_from(["", "text/plain", "multipart/form-data", "a/b;c"]))
        if form == 2
        else JSON
    )
    return Sent(path, content, content_type)


def encode(body: Any) -> bytes:
    """As JSON in ASCII, surrogates escaped, numbers that JSON does not have by Python's names; and
    deep lists.
    """
    parts = json.dumps(body).split(f'"{_DEEP} ')
    found = parts[0]
    for part in parts[1:]:
        depth, rest = part.split('"', 1)
        found += "[" * int(depth) + "]" * int(depth) + rest
    return found.encode()
