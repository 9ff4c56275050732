"""Calls of every kind that clients make, with the bodies that both servers get."""

import json
from dataclasses import dataclass, field
from typing import Any

from tests.deep.conformance.calls.speaker import NAME, prompt, says

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
Body = dict[str, Any]
SAMPLED: Body = {"seed": 7, "temperature": 1.0}


@dataclass(frozen=True)
class Call:
    """One call: a name, a route, and the body, which has the model's name unless `is_raw`."""

    name: str
    path: str
    body: Body = field(hash=False)
    is_raw: bool = False

    @property
    def content(self) -> str:
        """The body as it is sent."""
        return json.dumps(self.body if self.is_raw else {"model": NAME, **self.body})


def _both_ways(name: str, path: str, body: Body) -> list[Call]:
    """The call, and the same one streamed."""
    usage = {"stream_options": {"include_usage": True}} if path in (CHAT, COMPLETIONS) else {}
    return [
        Call(name, path, body),
        Call(f"{name}-streamed", path, {**body, "stream": True, **usage}),
    ]


# ---- texts

QUESTION: list[Body] = [{"role": "user", "content": "How do birds fly?"}]
BRIEF: list[Body] = [{"role": "system", "content": "Be brief."}, *QUESTION]
BEGUN: list[Body] = [*QUESTION, {"role": "assistant", "content": "With their"}]

_TEXTS: dict[str, Body] = {
    "plain": {"messages": BRIEF},
    "greedy": {"messages": BRIEF, "temperature": 0.0},
    "three-choices": {"messages": QUESTION, "n": 3},
    "logprobs": {"messages": QUESTION, "logprobs": True, "top_logprobs": 3, "max_tokens": 6},
    "token-ids": {"messages": QUESTION, "return_token_ids": True},
    "prompt-logprobs": {"messages": QUESTION, "prompt_logprobs": 1, "max_tokens": 3},
    "stop": {"messages": QUESTION, **says("One two three"), "stop": ["two"]},
    "stop-included": {
        "messages": QUESTION,
        **says("One two three"),
        "stop": ["two"],
        "include_stop_str_in_output": True,
    },
    "echo": {"messages": QUESTION, "echo": True, "add_generation_prompt": True},
    "continued": {
        "messages": BEGUN,
        "continue_final_message": True,
        "add_generation_prompt": False,
    },
    "template-argument": {"messages": BRIEF, "chat_template_kwargs": {"enable_thinking": False}},
    "own-template": {"messages": QUESTION, "chat_template": "{{ messages[0].content }}!"},
    "penalties": {
        "messages": QUESTION,
        "presence_penalty": 1.5,
        "frequency_penalty": 0.7,
        "repetition_penalty": 1.2,
        "max_tokens": 40,
    },
    "narrow": {"messages": QUESTION, "top_p": 0.7, "top_k": 20, "min_p": 0.05},
    "biased": {"messages": QUESTION, "logit_bias": {"65": 6, "66": 5.5, "67": -100}},
    "bad-words": {"messages": QUESTION, "bad_words": ["a", "e"], "max_tokens": 40},
    "allowed-tokens": {"messages": QUESTION, "allowed_token_ids": [65, 66, 67, 10]},
    "least-tokens": {"messages": QUESTION, "min_tokens": 12, "logit_bias": {"257": 8}},
}
_PROMPTS: dict[str, Body] = {
    "text": {"prompt": "Once upon a time"},
    "long": {"prompt": prompt(1, 700), "max_tokens": 40},
    "batch": {"prompt": ["Once", "upon a", "time"], "n": 2, "max_tokens": 8},
    "batch-of-tokens": {"prompt": [prompt(2, 9), prompt(3, 40)], "max_tokens": 8},
    "logprobs": {"prompt": prompt(4, 40), "logprobs": 2, "max_tokens": 8},
    "echo": {"prompt": "Once upon a time", "echo": True, "logprobs": 1, "max_tokens": 4},
    "truncated": {"prompt": prompt(5, 300), "truncate_prompt_tokens": 50},
    "stop-tokens": {"prompt": "Once", **says("upon a time"), "stop_token_ids": [97]},
    "as-token-ids": {"prompt": "Once", "logprobs": 1, "return_tokens_as_token_ids": True},
}

# ---- tools

FORECAST: Body = {
    "type": "function",
    "function": {
        "name": "forecast",
        "description": "The weather of a day",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": ["Bern", "Oslo"]},
                "indoors": {"type": "boolean"},
            },
            "required": ["city", "indoors"],
            "additionalProperties": False,
        },
    },
}
CLOCK: Body = {
    "type": "function",
    "function": {
        "name": "clock",
        "parameters": {
            "type": "object",
            "properties": {"zone": {"type": "string", "enum": ["UTC", "CET"]}},
            "required": ["zone"],
            "additionalProperties": False,
        },
    },
}
TOOLS = [FORECAST, CLOCK]
NAMED: Body = {"type": "function", "function": {"name": "clock"}}
_CALL = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'
OSLO = _CALL % ("forecast", '{"city": "Oslo", "indoors": true}')
UTC = _CALL % ("clock", '{"zone": "UTC"}')
THOUGHT = "<think>Birds have wings, and\nwings lift.</think>"
AT_ONCE: Body = {"chat_template_kwargs": {"enable_thinking": False}}
ASKED: Body = {"messages": QUESTION, "tools": TOOLS, "max_tokens": 200}
ANSWERED: list[Body] = [
    *QUESTION,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "clock", "arguments": '{"zone": "UTC"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "12:00"},
]

_TOOLS: dict[str, Body] = {
    "called": {**ASKED, **says(OSLO)},
    "two-called": {**ASKED, **says(f"Wait.\n{OSLO}\n{UTC}")},
    "two-called-one-wanted": {**ASKED, **says(f"{OSLO}\n{UTC}"), "parallel_tool_calls": False},
    "not-called": {**ASKED, **says("It is warm.")},
    "broken": {**ASKED, **says('<tool_call>\n{"name": "forecast", "argu</tool_call>')},
    "cut": {**ASKED, **says(OSLO), "max_tokens": 30},
    "unknown": {**ASKED, **says(OSLO.replace("forecast", "oracle"))},
    "none": {**ASKED, **says(OSLO), "tool_choice": "none"},
    "required": {**ASKED, **AT_ONCE, "tool_choice": "required"},
    "required-after-reasoning": {
        **ASKED,
        **says(THOUGHT, ends=False),
        "tool_choice": "required",
    },
    "named": {**ASKED, **AT_ONCE, "tool_choice": NAMED},
    "named-after-reasoning": {**ASKED, **says(THOUGHT, ends=False), "tool_choice": NAMED},
    "answered": {"messages": ANSWERED, "tools": TOOLS},
    "after-reasoning": {**ASKED, **says(f"{THOUGHT}{OSLO}")},
}

# ---- reasoning

_REASONING: dict[str, Body] = {
    "reasoned": {"messages": QUESTION, **says(f"{THOUGHT}They flap."), "max_tokens": 99},
    "reasoned-on": {"messages": QUESTION, **says(THOUGHT, ends=False), "max_tokens": 60},
    "never-ended": {"messages": QUESTION, **says("<think>Birds"), "max_tokens": 99},
    "left-out": {
        "messages": QUESTION,
        **says(f"{THOUGHT}They flap."),
        "include_reasoning": False,
        "max_tokens": 99,
    },
    "not-wanted": {"messages": QUESTION, **says("They flap."), **AT_ONCE},
    "budget": {
        "messages": QUESTION,
        **says("<think>", ends=False),
        "thinking_token_budget": 9,
        "max_tokens": 40,
    },
}

# ---- structured output

SCHEMA: Body = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "green", "blue"]},
        "sure": {"type": "boolean"},
        "marks": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    },
    "required": ["colour", "sure", "marks"],
    "additionalProperties": False,
}
NAMED_SCHEMA: Body = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
GRAMMAR = 'root ::= sum\nsum ::= digit (("+" | "-") digit){6}\ndigit ::= [0-9]'
LONG: Body = {"messages": QUESTION, "max_tokens": 120}
PLAIN: Body = {**LONG, **AT_ONCE}

_STRUCTURED: dict[str, Body] = {
    "json": {**PLAIN, "structured_outputs": {"json": SCHEMA}},
    "json-schema": {**PLAIN, "response_format": NAMED_SCHEMA},
    "any-json": {**PLAIN, "response_format": {"type": "json_object"}, "max_tokens": 30},
    "regex": {**PLAIN, "structured_outputs": {"regex": "[abc]{12}-[0-9]{12}"}},
    "choice": {**PLAIN, "structured_outputs": {"choice": ["Berlin", "Paris", "Rome"]}},
    "grammar": {**PLAIN, "structured_outputs": {"grammar": GRAMMAR}},
    "after-reasoning": {
        **LONG,
        **says(THOUGHT, ends=False),
        "structured_outputs": {"json": SCHEMA},
    },
    "two": {**PLAIN, "structured_outputs": {"json": SCHEMA, "regex": "a"}},
    "bad-schema": {**PLAIN, "structured_outputs": {"json": {"type": "no-such-type"}}},
    "bad-regex": {**PLAIN, "structured_outputs": {"regex": "(["}},
    "bad-grammar": {**PLAIN, "structured_outputs": {"grammar": "no grammar"}},
    "no-choice": {**PLAIN, "structured_outputs": {"choice": []}},
}

# ---- other routes

FLAT_TOOL: Body = {"type": "function", **FORECAST["function"]}
_RESPONSES: dict[str, Body] = {
    "text": {"input": "How do birds fly?", "instructions": "Be brief."},
    "messages": {"input": BRIEF},
    "reasoned": {"input": QUESTION, **says(f"{THOUGHT}They flap."), "max_output_tokens": 99},
    "called": {
        "input": QUESTION,
        "tools": [FLAT_TOOL],
        **says(OSLO),
        "max_output_tokens": 200,
    },
    "json-schema": {
        "input": QUESTION,
        **says("<think></think>", ends=False),
        "text": {"format": {"type": "json_schema", "name": "s", "schema": SCHEMA}},
        "max_output_tokens": 120,
    },
    "unknown-before": {"input": "And then?", "previous_response_id": "resp_none"},
}
_MESSAGES: dict[str, Body] = {
    "text": {"messages": QUESTION, "system": "Be brief."},
    "called": {
        "messages": QUESTION,
        "tools": [
            {
                "name": "forecast",
                "description": "The weather of a day",
                "input_schema": FORECAST["function"]["parameters"],
            }
        ],
        **says(OSLO),
        "max_tokens": 200,
    },
}
_OTHERS: tuple[tuple[str, Body], ...] = (
    ("/tokenize", {"prompt": "Once upon a time", "return_token_strs": True}),
    ("/tokenize", {"messages": BRIEF, "add_generation_prompt": True}),
    ("/detokenize", {"tokens": prompt(6, 20)}),
    ("/v1/messages/count_tokens", {"messages": QUESTION}),
    ("/v1/chat/completions/render", {"messages": BRIEF}),
)

# ---- wrong values

_WRONG: dict[str, Body] = {
    "temperature": {"temperature": -1},
    "top_p": {"top_p": 2},
    "top_k": {"top_k": -7},
    "n": {"n": 0},
    "max_tokens": {"max_tokens": 0},
    "min_tokens": {"min_tokens": 9, "max_tokens": 3},
    "logprobs": {"logprobs": True, "top_logprobs": 1000},
    "top-without-logprobs": {"top_logprobs": 2},
    "penalty": {"repetition_penalty": 0},
    "too-long": {"max_tokens": 5000},
    "seed": {"seed": "x"},
    "stream_options": {"stream_options": {"include_usage": True}},
    "role": {"messages": [{"role": "bird", "content": "x"}]},
    "no-messages": {"messages": []},
    "content": {"messages": [{"role": "user", "content": 3}]},
    "image": {
        "messages": [
            {
                "role": "user",
                "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}],
            }
        ]
    },
    "logit_bias": {"logit_bias": {"9999": 1}},
    "allowed_token_ids": {"allowed_token_ids": [9999]},
    "bad_words": {"bad_words": [""]},
    "no-such-field": {"no_such_field": 1},
    "response_format": {"response_format": {"type": "poem"}},
    "tool-without-tools": {"tool_choice": "required"},
    "unknown-tool": {
        "tools": TOOLS,
        "tool_choice": {"type": "function", "function": {"name": "oracle"}},
    },
    "no-tools": {"tools": []},
    "tool-choice": {"tools": TOOLS, "tool_choice": "maybe"},
    "continued-and-prompted": {"continue_final_message": True, "add_generation_prompt": True},
}


def _all() -> list[Call]:
    calls = []
    for kind, bodies in (
        ("chat", _TEXTS),
        ("tools", _TOOLS),
        ("reasoning", _REASONING),
        ("structured", _STRUCTURED),
    ):
        for name, body in bodies.items():
            calls += _both_ways(f"{kind}-{name}", CHAT, {"max_tokens": 24, **SAMPLED, **body})
    for name, body in _PROMPTS.items():
        calls += _both_ways(
            f"completion-{name}", COMPLETIONS, {"max_tokens": 24, **SAMPLED, **body}
        )
    for name, body in _RESPONSES.items():
        fields: Body = {"max_output_tokens": 24, **SAMPLED, **body}
        calls += _both_ways(f"responses-{name}", RESPONSES, fields)
    for name, body in _MESSAGES.items():
        calls += _both_ways(f"messages-{name}", MESSAGES, {"max_tokens": 24, "top_k": 1, **body})
    for number, (path, body) in enumerate(_OTHERS):
        calls.append(Call(f"{path.rpartition('/')[2]}-{number}", path, body))
    for name, body in _WRONG.items():
        calls.append(
            Call(f"wrong-{name}", CHAT, {"messages": QUESTION, "max_tokens": 5, **SAMPLED, **body})
        )
    calls.append(Call("wrong-model", CHAT, {"model": "other", "messages": QUESTION}, is_raw=True))
    calls.append(Call("wrong-list", COMPLETIONS, {"prompt": []}))
    return calls


CALLS = {call.name: call for call in _all()}
