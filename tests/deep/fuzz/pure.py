"""What is fuzzed without a server: the functions that read what clients and files say, one case at
a time.
"""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fastapi import HTTPException
from hypothesis import strategies as st
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams

from flying_serving.errors import LayoutError
from flying_serving.layout.groups import Layout
from flying_serving.server.http.bodies import parse_json
from flying_serving.server.http.layout_order import LayoutOrder, refusal_of
from tests.deep.fuzz import traces
from tests.deep.fuzz.admin import orders
from tests.deep.fuzz.bodies import encode, whole
from tests.deep.fuzz.drawing import damaged, draw
from tests.deep.fuzz.extensions import xargs
from tests.with_vllm.server.doubles import Server

HANGS_S = 10.0
"""A case that takes longer has failed: each takes some ms, but the machine may be busy."""
Check = Callable[[Any], str]


@dataclass
class Tally:
    """What came of one kind of cases: how many of each status, those that failed and why, the
    longest one's seconds.
    """

    statuses: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    longest_s: float = 0.0


def run(check: Check, cases: list[Any]) -> Tally:
    """Check them one by one. A check returns a status, or raises what nobody should see."""
    tally = Tally()
    for case in cases:
        began_s = time.monotonic()
        try:
            status = check(case)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is a finding, and the next case is checked
            status = "failed"
            tally.failures.append(f"{type(error).__name__}: {error!s:.200}: {case!r:.600}")
        took_s = time.monotonic() - began_s
        if took_s > HANGS_S:
            tally.failures.append(f"{took_s:.0f} s: {case!r:.600}")
        tally.longest_s = max(tally.longest_s, took_s)
        tally.statuses[status] += 1
    return tally


def check_order(content: bytes) -> str:
    """An order as the route reads it. A refusal can be sent, and is short."""
    try:
        body = parse_json(content)
    except HTTPException:
        return "no JSON"
    try:
        order = LayoutOrder.parse(body)
        Layout.parse(order.groups, 2, (1, 2))
    except LayoutError as error:
        sent = json.dumps(refusal_of(error), ensure_ascii=False, allow_nan=False).encode()
        assert len(sent) < 20_000, len(sent)
        return "refused"
    return "taken"


def check_request(content: bytes) -> str:
    """What a request says beside vLLM's fields, as the shell checks it before the request
    begins.
    """
    try:
        asked = json.loads(content)
    except RecursionError:
        return "too deep"
    fields = {
        "prompt_token_ids": [1] * asked["prompt"],
        "prompt_embeds": None,
        "priority": asked["priority"],
    }
    try:
        params = SamplingParams(max_tokens=asked["max_tokens"], extra_args=asked["extra"])
        _SHELLS[0].shell.checks.let_in("call", {**fields, "sampling_params": params}, set())
    except VLLMValidationError as error:
        answer = create_error_response(error)
        assert answer.error.code == 400
        assert len(answer.model_dump_json()) < 20_000
        return "refused"
    return "taken"


async def _shell() -> Server:
    return Server()


_SHELLS = [asyncio.run(_shell())]
_requests = st.fixed_dictionaries(
    {
        "extra": xargs.filter(lambda extra: isinstance(extra, dict)),
        "priority": st.integers(-9, 9) | whole,
        "max_tokens": st.none() | st.integers(1, 500),
        "prompt": st.integers(1, 400),
    }
).map(encode)


@dataclass(frozen=True)
class Kind:
    """One kind of cases: how they are made, what checks one, how many of 100 are of this kind.

    `vary`: makes so many more from one, with a number for what is random; `varied`: how many.
    """

    cases: st.SearchStrategy[Any]
    check: Check
    share: int
    vary: Callable[[Any, int, int], Iterator[Any]] | None = None
    varied: int = 0

    def draw(self, count: int, first_seed: int) -> list[Any]:
        """That many cases."""
        drawn = draw(self.cases, -(-count // (1 + self.varied)), first_seed)
        if self.vary is None:
            return drawn
        more = [
            one for number, case in enumerate(drawn) for one in self.vary(case, self.varied, number)
        ]
        return (drawn + more)[:count]


def _files(file: traces.File, count: int, number: int) -> Iterator[traces.File]:
    return (replace(file, content=content) for content in damaged(file.content, count, number))


KINDS: Mapping[str, Kind] = {
    "traces and workload files": Kind(traces.trace_files(), traces.read, 80, _files, 9),
    "vllm_xargs and priority": Kind(_requests, check_request, 12),
    "orders of a layout": Kind(orders.map(encode), check_order, 8, damaged, 3),
}


def fuzz_pure(count: int, first_seed: int) -> Iterator[tuple[str, Tally]]:
    """Yield what comes of each kind, by its name; the kinds share that many cases."""
    for name, kind in KINDS.items():
        yield name, run(kind.check, kind.draw(-(-count * kind.share // 100), first_seed))
