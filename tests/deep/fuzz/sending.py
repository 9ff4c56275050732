"""Send fuzzed requests to a live server while good ones are served, and see that it has not
suffered.
"""

import asyncio
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx

from harness.live import Server
from harness.streams import WORST_LOGPROB, worst_difference
from tests.deep.fuzz.drawing import Sent
from tests.deep.fuzz.stock import fails_in_stock, logged_by_stock

AT_ONCE = 8
ANSWER_S = 180.0
"""A request for all tokens that the model has takes a minute on two cores that others use."""
SHOWN = 600
NO_ANSWER = 599
"""Instead of a status: the connection ended without one, or nothing came in time."""
Failure = tuple[Sent, int, str]
"""What was sent, the status of its answer, and the text of it."""
TRACEBACK = "Traceback (most recent call last)"
_PREFIX = re.compile(r"^(\(\w+ pid=\d+\) ?)?([A-Z]+ \d\d-\d\d [\d:]+ \[[^]]*\] ?)?")


@dataclass
class Found:
    """What came of it: how many answers of each status, and those that nobody should get."""

    statuses: Counter[int] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)
    as_stock: Counter[str] = field(default_factory=Counter)
    good: int = 0
    wrong: list[str] = field(default_factory=list)

    def report(self) -> str:
        """A few lines for people."""
        lines = [f"answers by status: {dict(sorted(self.statuses.items()))}"]
        lines += [
            f"5xx as in stock vLLM: {count} x {reason}"
            for reason, count in sorted(self.as_stock.items())
        ]
        lines += [
            f"good requests beside them: {self.good}, wrong: {len(self.wrong)}",
            *self.wrong[:10],
        ]
        alike = {
            (sent.path, status, text[:100]): sent for sent, status, text in reversed(self.failures)
        }
        for (path, status, text), sent in alike.items():
            lines += [
                f"{status} {sent.method} {path} {sent.content[:SHOWN]!r} {sent.headers}",
                f"  {text}",
            ]
        return "\n".join(lines)


def client_of(server: Server) -> httpx.AsyncClient:
    """A client that opens a connection for each request: one that is kept may be closed by the
    server at any time.
    """
    limits = httpx.Limits(max_keepalive_connections=0)
    return httpx.AsyncClient(base_url=server.url, timeout=ANSWER_S, limits=limits)


async def send(http: httpx.AsyncClient, sent: Sent) -> tuple[int, str]:
    """Status and text of the answer; an error inside a stream counts by its own code, a traceback
    as none.
    """
    headers = dict(sent.headers) | (
        {"Content-Type": sent.content_type} if sent.content_type else {}
    )
    try:
        answer = await http.request(sent.method, sent.path, content=sent.content, headers=headers)
    except httpx.HTTPError as error:
        return NO_ANSWER, repr(error)
    if TRACEBACK in answer.text:
        return NO_ANSWER, answer.text
    inside = re.search(r'^data: \{("error"|"type": "error").*"code": ?"?(\d+)', answer.text, re.M)
    return (int(inside[2]) if inside else answer.status_code), answer.text


def has_passed_its_deadline(sent: Sent, status: int, text: str) -> bool:
    """Whether a request that names a deadline was told that it passed: right on a machine that is
    busy.
    """
    names_deadline = b"queue_deadline_s" in sent.content
    return status == 504 and names_deadline and "longer than its queue_deadline_s" in text


async def fuzz(server: Server, requests: list[Sent], is_known: Any = fails_in_stock) -> Found:
    """Send them, some at once, while good ones are asked and compared."""
    found, left, over = Found(), iter(requests), asyncio.Event()
    async with client_of(server) as http:

        async def fuzz_one_by_one() -> None:
            for sent in left:
                status, text = await send(http, sent)
                found.statuses[status] += 1
                if status < 500 or has_passed_its_deadline(sent, status, text):
                    continue
                reason = is_known(sent, status, text)
                if reason is None:
                    found.failures.append((sent, status, text))
                else:
                    found.as_stock[reason] += 1

        beside = [
            asyncio.create_task(ask_again(http, server.model, degree, found, over))
            for degree in (1, 2)
        ]
        await asyncio.gather(*(fuzz_one_by_one() for _ in range(AT_ONCE)))
        over.set()
        await asyncio.gather(*beside)
    return found


async def ask_again(
    http: httpx.AsyncClient, model: str, degree: int, found: Found, over: asyncio.Event
) -> None:
    """Ask the same few things again and again; each answer has to be the first one's."""
    first: dict[int, tuple[list[int], list[float]]] = {}
    number = 0
    while not over.is_set() or number < 8:
        number += 1
        which = number % 4
        body = {
            "model": model,
            "prompt": [which + 1] * (20 * which + 5),
            "max_tokens": 24,
            "seed": which,
        }
        body |= {"temperature": 1.0, "ignore_eos": True, "return_token_ids": True, "logprobs": 0}
        answer = await http.post(
            "/v1/completions", json=body | {"vllm_xargs": {"tp_degree": degree}}
        )
        found.good += 1
        if answer.status_code != 200:
            found.wrong.append(f"degree {degree}: {answer.status_code} {answer.text[:200]}")
            continue
        choice = answer.json()["choices"][0]
        got = choice["token_ids"], choice["logprobs"]["token_logprobs"]
        tokens, logprobs = first.setdefault(which, got)
        if (
            got[0] != tokens
            or len(tokens) != 24
            or worst_difference(got[1], logprobs) > WORST_LOGPROB
        ):
            found.wrong.append(f"degree {degree}, prompt {which}: {got[0]}, first it was {tokens}")


def end_is_clean(server: Server) -> None:
    """The server is healthy and idle, the blocks of every engine add up, and no traceback of ours
    is in its log.
    """
    assert server.http.get("/health").status_code == 200
    server.until_idle()
    server.check()
    ended_by = [line for line in tracebacks(server.log()) if not logged_by_stock(line)]
    assert not ended_by, ended_by


def tracebacks(log: str) -> list[str]:
    """The last line of each traceback in a server's log: the error. The log's own prefixes are
    dropped.
    """
    lines = iter([_PREFIX.sub("", line) for line in log.splitlines()])
    return [
        next((line for line in lines if not line.startswith(" ")), "")
        for line in lines
        if TRACEBACK in line
    ]
