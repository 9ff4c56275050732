"""Send fuzzed requests to a live server of two engines while good ones are served: `make fuzz ARGS="--count 10000"`.

It fails if the server answers one of them with 5xx and stock vLLM does not, if a good request beside them is not
complete and right, or if afterwards the server is not healthy and idle, with every book closed.
"""

import argparse
import asyncio
import json
import re
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.fuzz.bodies import Sent, draw_requests
from tests.fuzz.stock import fails_in_stock
from tests.live import FLAGS, STOCK, Server, tiny
from tests.streams import WORST_LOGPROB, worst_difference

OURS = ("--policy=auto", "--priority-aging-s=2")
COMMON = (
    "--max-model-len=256",
    "--enable-scale-out",
    "--enable-auto-tool-choice",
    "--tool-call-parser=hermes",
    '--structured-outputs-config={"backend": "xgrammar"}',
)
"""One backend for grammars: by vLLM's default each engine, stock's too, compiles all of them with the backend that the
first one asked for, so what comes of a request depends on which came before it."""
SETTINGS = OURS + COMMON
AT_ONCE = 8
ANSWER_S = 60.0
SHOWN = 600
NO_ANSWER = 599
"""Instead of a status: the connection ended without one, or nothing came in time."""


@dataclass
class Found:
    """What came of it: how many answers of each status, and those that nobody should get."""

    statuses: Counter[int] = field(default_factory=Counter)
    failures: list[tuple[Sent, int, str]] = field(default_factory=list)
    as_stock: Counter[str] = field(default_factory=Counter)
    good: int = 0
    wrong: list[str] = field(default_factory=list)

    def report(self) -> str:
        """A few lines for people."""
        lines = [f"answers by status: {dict(sorted(self.statuses.items()))}"]
        lines += [f"5xx as in stock vLLM: {count} x {reason}" for reason, count in sorted(self.as_stock.items())]
        lines += [f"good requests beside them: {self.good}, wrong: {len(self.wrong)}", *self.wrong[:10]]
        alike = {(sent.path, status, text[:100]): sent for sent, status, text in reversed(self.failures)}
        for (path, status, text), sent in alike.items():
            lines += [f"{status} {path} {sent.content[:SHOWN]!r}", f"  {text}"]
        return "\n".join(lines)


def client_of(server: Server) -> httpx.AsyncClient:
    """A client that opens a connection for each request: one that is kept may be closed by the server at any time."""
    limits = httpx.Limits(max_keepalive_connections=0)
    return httpx.AsyncClient(base_url=server.url, timeout=ANSWER_S, limits=limits)


async def send(http: httpx.AsyncClient, sent: Sent) -> tuple[int, str]:
    """Status and text of the answer; an error inside a stream counts by its own code."""
    headers = {"Content-Type": sent.content_type} if sent.content_type else {}
    try:
        answer = await http.post(sent.path, content=sent.content, headers=headers)
    except httpx.HTTPError as error:
        return NO_ANSWER, repr(error)
    inside = re.search(r'^data: \{"error".*"code": ?(\d+)', answer.text, re.M)
    return (int(inside[1]) if inside else answer.status_code), answer.text


async def fuzz(server: Server, requests: list[Sent], is_known: Any = fails_in_stock) -> Found:
    """Send them, some at once, while good ones are asked and compared."""
    found, left, over = Found(), iter(requests), asyncio.Event()
    async with client_of(server) as http:

        async def fuzz_one_by_one() -> None:
            for sent in left:
                status, text = await send(http, sent)
                found.statuses[status] += 1
                if status < 500:
                    continue
                reason = is_known(sent, status, text)
                if reason is None:
                    found.failures.append((sent, status, text))
                else:
                    found.as_stock[reason] += 1

        beside = [asyncio.create_task(ask_again(http, server.model, degree, found, over)) for degree in (1, 2)]
        await asyncio.gather(*(fuzz_one_by_one() for _ in range(AT_ONCE)))
        over.set()
        await asyncio.gather(*beside)
    return found


async def ask_again(http: httpx.AsyncClient, model: str, degree: int, found: Found, over: asyncio.Event) -> None:
    """Ask the same few things again and again; each answer has to be the first one's."""
    first: dict[int, tuple[list[int], list[float]]] = {}
    number = 0
    while not over.is_set() or number < 8:
        number += 1
        which = number % 4
        body = {"model": model, "prompt": [which + 1] * (20 * which + 5), "max_tokens": 24, "seed": which}
        body |= {"temperature": 1.0, "ignore_eos": True, "return_token_ids": True, "logprobs": 0}
        answer = await http.post("/v1/completions", json=body | {"vllm_xargs": {"tp_degree": degree}})
        found.good += 1
        if answer.status_code != 200:
            found.wrong.append(f"degree {degree}: {answer.status_code} {answer.text[:200]}")
            continue
        choice = answer.json()["choices"][0]
        got = choice["token_ids"], choice["logprobs"]["token_logprobs"]
        tokens, logprobs = first.setdefault(which, got)
        if got[0] != tokens or len(tokens) != 24 or worst_difference(got[1], logprobs) > WORST_LOGPROB:
            found.wrong.append(f"degree {degree}, prompt {which}: {got[0]}, first it was {tokens}")


def end_is_clean(server: Server) -> None:
    """The server is healthy and idle: nothing runs or waits, and the blocks of every engine add up."""
    assert server.http.get("/health").status_code == 200
    server.until_idle()
    server.check()


def main() -> int:
    """Run as a program. Returns 1 if something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m tests.fuzz.run")
    parser.add_argument("--count", type=int, default=10_000, help="how many requests")
    parser.add_argument("--seed", type=int, default=0, help="which ones")
    parser.add_argument("--stock", action="store_true", help="send what gets 5xx to stock vLLM, and compare")
    parser.add_argument("--save", type=Path, help="write what fails there, one JSON object a line")
    args = parser.parse_args()
    model = tiny("llama")
    requests = draw_requests(args.count, str(model), args.seed)
    started = time.monotonic()
    with Server(model, 2, *SETTINGS) as server:
        found = asyncio.run(fuzz(server, requests, (lambda *_: None) if args.stock else fails_in_stock))
        end_is_clean(server)
    sys.stdout.write(f"{len(requests)} requests in {time.monotonic() - started:.0f} s\n{found.report()}\n")
    if args.save is not None:
        rows = [
            {"path": s.path, "body": s.content.decode("latin-1"), "status": c, "text": t} for s, c, t in found.failures
        ]
        args.save.write_text("".join(json.dumps(row) + "\n" for row in rows))
    only_ours = found.failures
    if args.stock and found.failures:
        with Server(model, 1, *COMMON, "--enforce-eager", base=FLAGS[1:], program=STOCK) as stock:
            only_ours = asyncio.run(compare(stock, found.failures))
    return 1 if only_ours or found.wrong else 0


async def compare(stock: Server, failures: list[tuple[Sent, int, str]]) -> list[tuple[Sent, int, str]]:
    """Those that stock vLLM does not answer with 5xx too."""
    only_ours, compared = [], Counter[str]()
    async with client_of(stock) as http:
        for sent, status, text in failures:
            theirs, their_text = await send(http, sent)
            compared[f"{sent.path}: ours {status} {text[:160]!r}, stock {theirs} {their_text[:160]!r}\n"] += 1
            if theirs < 500:
                only_ours.append((sent, status, text))
    sys.stdout.writelines(f"{count} x {line}" for line, count in compared.items())
    sys.stdout.write(f"{len(failures)} with 5xx, of which {len(only_ours)} only here\n")
    return only_ours


if __name__ == "__main__":
    sys.exit(main())
