"""Wrong use over HTTP, and what a server answers."""

import math
from typing import Any

from flying_serving.config import MODES
from flying_serving.server.http.bodies import MAX_BODY_BYTES
from tests.deep.server.errors.case import Case


def degree_case(value: Any, shown: str) -> Case:
    says = f"vllm_xargs.tp_degree={value!r}: must be one of [1, 2, 4]"
    return Case(f'`"tp_degree": {shown}`', says, 400, {"vllm_xargs": {"tp_degree": value}})


def _xarg(name: str, value: Any, shown: str) -> Case:
    says = f"vllm_xargs.{name}={value!r}: must be a number above 0 up to 86400"
    return Case(f'`"{name}": {shown}`', says, 400, {"vllm_xargs": {name: value}})


def _tokens(name: str, value: int, allowed: str) -> Case:
    says = f"vllm_xargs.{name}={value}: must be a whole number from {allowed}"
    return Case(f'`"{name}": {value}`', says, 400, {"vllm_xargs": {name: value}})


TOO_LONG_PROMPT = "This model's maximum context length is 4096 tokens"


def _long(what: str, prompt_tokens: int, degree: int | None, says: str) -> Case:
    xargs = {} if degree is None else {"vllm_xargs": {"tp_degree": degree}}
    return Case(what, says, 400, {"prompt": [1] * prompt_tokens, **xargs})


REQUEST_CASES = (
    degree_case(3, "3"),
    degree_case(0, "0"),
    degree_case(-2, "-2"),
    degree_case(8, "8"),
    degree_case("x", '"x"'),
    degree_case("2", '"2"'),
    degree_case(2.0, "2.0"),
    degree_case([2], "[2]"),
    Case(
        '`"tp_degree": null`',
        "Input should be a valid integer",
        400,
        {"vllm_xargs": {"tp_degree": None}},
    ),
    _xarg("queue_deadline_s", 0, "0"),
    _xarg("queue_deadline_s", "x", '"x"'),
    _tokens("expected_tokens", 0, "1 to 4096"),
    _tokens("split_at", -1, "0 to 7"),
    Case(
        '`"flying_lane": 2`',
        "vllm_xargs.flying_lane is not for clients",
        400,
        {"vllm_xargs": {"flying_lane": 2}},
    ),
    Case('`"vllm_xargs": [2]`', "Input should be a valid dictionary", 400, {"vllm_xargs": [2]}),
    _long("prompt longer than `--max-model-len`", 4097, None, TOO_LONG_PROMPT),
    _long('the same with `"tp_degree": 2`', 4097, 2, TOO_LONG_PROMPT),
    _long(
        "prompt and `max_tokens` longer than the KV cache of `tp_degree`",
        1500,
        1,
        "vllm_xargs.tp_degree=1: its KV cache holds 1024 tokens, prompt plus max_tokens are "
        "1504; degree 2 would do",
    ),
    _long(
        "the same with a wider degree that does not do either",
        2500,
        2,
        "vllm_xargs.tp_degree=2: its KV cache holds 2048 tokens, prompt plus max_tokens are "
        "2504; degree 4 would do",
    ),
    Case(
        "`max_tokens` beyond `--max-model-len`",
        "max_tokens=5000 cannot be greater than max_model_len=4096",
        400,
        {"max_tokens": 5000},
    ),
    Case(
        "a token that the model does not have",
        "Token id 99999 is out of vocabulary",
        400,
        {"prompt": [99999]},
        True,
    ),
    Case(
        "another model's name",
        "The model `nope` does not exist".replace("`", ""),
        404,
        {"model": "nope"},
    ),
)

ALONE = [[0], [1], [2], [3]]


def _steps(value: Any, shown: str) -> Case:
    says = f"weave_steps={value!r}: must be a whole number from 1 up to 1000"
    return Case(f'`"weave_steps": {shown}`', says, 400, {"groups": ALONE, "weave_steps": value})


ALIGNED = "groups are aligned and contiguous, like [0, 1]"
NUMBERS = "must be a non-empty list of engine numbers"
LISTS = "must be a non-empty list of lists of engine numbers"
A_MODE = f"must be one of {list(MODES)}"


def _groups(what: str, groups: Any, problem: str, at: int | None = None) -> Case:
    """Wrong groups, or one of them is: the one at this place."""
    field, value = ("groups", groups) if at is None else (f"groups[{at}]", groups[at])
    return Case(what, f"{field}={value!r}: {problem}", 400, {"groups": groups})


_NO_KEY_SET = "without an API key (--api-key, VLLM_API_KEY) the admin routes answer"
LAYOUT_CASES = (
    _groups(
        "an engine in two groups", [[0, 1], [1], [2], [3]], "engine 1 is in more than one group"
    ),
    _groups("an engine twice in a group", [[0, 0], [1], [2], [3]], ALIGNED, 0),
    _groups("a group that is not aligned", [[0], [1, 2], [3]], ALIGNED, 1),
    _groups("a group that is not contiguous", [[0, 2], [1, 3]], ALIGNED, 0),
    _groups("an engine left out", [[0, 1]], "engine 2 is in no group; name every engine"),
    _groups(
        "a size that the server does not have",
        [[0, 1, 2], [3]],
        "group size 3 is not one of [1, 2, 4]",
        0,
    ),
    _groups(
        "an engine that does not exist", [[0, 1], [2, 3], [4]], "engine 4 is not one of 0..3", 2
    ),
    _groups("a negative engine", [[-1]], "engine -1 is not one of 0..3", 0),
    _groups("no groups", [], LISTS),
    _groups("an empty group", [[], [0, 1, 2, 3]], NUMBERS, 0),
    _groups("`groups` as text", "0,1 2,3", LISTS),
    _groups("`groups` as a flat list", [0, 1, 2, 3], NUMBERS, 0),
    Case("`groups` missing", f"groups=None: {LISTS}", 400, {"mode": "hard"}),
    _groups("half an engine", [[0, 1], [2.5, 3]], "engine 2.5 is not one of 0..3", 1),
    Case("an unknown mode", f"mode='gentle': {A_MODE}", 400, {"groups": ALONE, "mode": "gentle"}),
    Case("`mode` as a number", f"mode=3: {A_MODE}", 400, {"groups": ALONE, "mode": 3}),
    _steps(0, "0"),
    _steps(1001, "1001"),
    _steps(1.5, "1.5"),
    _steps("x", '"x"'),
    Case(
        "a field that does not exist",
        "force=True: unknown; known are groups, mode, weave_steps",
        400,
        {"groups": ALONE, "force": True},
    ),
    Case(
        "a list as the body", "body=[[0, 1], [2, 3]]: must be a JSON object", 400, [[0, 1], [2, 3]]
    ),
    _groups("`NaN` as an engine", [[math.nan]], "engine nan is not one of 0..3", 0),
)


def _right(shown: str, field: str, value: int, **send: Any) -> Case:
    return Case(
        f"`{shown}`",
        f"{field}={value}: clients may not set it on this server (--clients-may-set)",
        400,
        send,
    )


RIGHTS_CASES = (
    _right('"priority": -1', "priority", -1, priority=-1),
    _right("X-Vllm-Priority: -1", "priority", -1, priority=-1),
    _right('"tp_degree": 2', "vllm_xargs.tp_degree", 2, extra={"tp_degree": 2}),
    _right('"split_at": 9', "vllm_xargs.split_at", 9, extra={"split_at": 9}),
    _right('"expected_tokens": 9', "vllm_xargs.expected_tokens", 9, extra={"expected_tokens": 9}),
)
BODY_CASES = (
    LONG_BODY := Case(
        "a body of more than 16777216 bytes",
        "body: must be at most 16777216 bytes long (--max-body-bytes), is",
        413,
    ),
    DEEP_BODY := Case(
        "a body nested too deeply for JSON's parser",
        "There was an error parsing the body",
    ),
    DEEP_CHECKED := Case(
        "a body nested too deeply for `/invocations`, or for a check of vLLM",
        "body: is nested too deeply",
    ),
)
ROUTE_CASES = (
    OTHERS := Case(
        "no API key is set: another machine, or a proxy's request",
        f"{_NO_KEY_SET} this machine alone",
        403,
    ),
    PAGES := Case(
        "no API key is set: a page of another site", f"{_NO_KEY_SET} no pages of other sites", 403
    ),
    NAMES := Case(
        "no API key is set: a `Host` that is another's name for this machine",
        f"{_NO_KEY_SET} to localhost, loopback addresses and --host alone",
        403,
    ),
    WRONG_KEY := Case("a wrong API key, on every route", "Unauthorized", 401),
    NO_KEY := Case("no API key, on every route", "Unauthorized", 401),
    NO_JSON := Case("a body that is not JSON", "JSON decode error"),
    TOO_LONG := Case(
        f"a body of more than {MAX_BODY_BYTES} bytes",
        f"body: must be at most {MAX_BODY_BYTES} bytes long",
        413,
    ),
    TOO_DEEP := Case(
        "a body nested more than 200 deep",
        "body: JSON decode error: recursion limit exceeded",
    ),
    WRONG_METHOD := Case("`GET /flying/layout`", "Method Not Allowed", 405),
    NO_ROUTE := Case("`GET /flying/nothing`", "Not Found", 404),
    ELASTIC := Case(
        "`POST /scale_elastic_ep`",
        "elastic expert parallelism cannot be served by Flying Serving yet",
    ),
    NO_TYPE := Case(
        "`POST /flying/layout` or `/flying/check` of another content type",
        "Only 'application/json' is allowed",
    ),
    NOTHING_WAITS := Case(
        "`DELETE /flying/layout` when no change waits",
        "no change of layout waits for requests to end",
        409,
    ),
    CANCELLED := Case("an order that is cancelled while it waits", "the order was cancelled", 409),
    REPLACED := Case(
        "an order that another replaces while it waits", "a later order has replaced this one", 409
    ),
)
ROUTES = (
    ("GET", "/flying/status"),
    ("POST", "/flying/layout"),
    ("GET", "/flying/switches"),
    ("POST", "/flying/check"),
)
