"""Fuzz what strangers can reach: `make fuzz ARGS="--cases 100000"`, and a table of what came of it.

Of 58 cases one is a request of vLLM's schemas, one a request with our extensions, both to a live
server of two engines whose policy is `auto`, and one a request to the admin routes of a server
whose policy is `manual`, while good requests are served. The others are trace files, extensions
and orders that go through the functions that read them.

It fails if the server answers one of them with 5xx and stock vLLM does not, if a good request
beside them is not complete and right, or if afterwards the server is not healthy and idle, with
every book closed and no traceback logged; and if a function raises what nobody should see, or takes
too long.
"""

import argparse
import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from harness.live import FLAGS, STOCK, Server, tiny
from tests.deep.fuzz.admin import admin_requests
from tests.deep.fuzz.bodies import requests
from tests.deep.fuzz.drawing import draw
from tests.deep.fuzz.extensions import extended
from tests.deep.fuzz.pure import fuzz_pure
from tests.deep.fuzz.sending import Failure, Found, client_of, end_is_clean, fuzz, send
from tests.deep.fuzz.stock import fails_in_stock

OURS = ("--policy=auto", "--priority-aging-s=2")
COMMON = (
    "--max-model-len=256",
    "--enable-scale-out",
    "--enable-auto-tool-choice",
    "--tool-call-parser=hermes",
    '--structured-outputs-config={"backend": "xgrammar"}',
)
"""One backend for grammars: by vLLM's default each engine, stock's too, compiles all of them with
the backend that the first one asked for, so what comes of a request depends on which came before
it.
"""
SETTINGS = OURS + COMMON
SHARE = 58
"""One in so many cases is of each kind that goes over HTTP."""


def fuzz_requests(
    server: Server, count: int, seed: int, is_known: Any = fails_in_stock
) -> Iterator[tuple[str, Found]]:
    """Requests of vLLM's schemas, and with our extensions; the policy decides the layout. Yields
    what comes of each.
    """
    for name, kind in (("HTTP: vLLM's fields", requests), ("HTTP: our extensions", extended)):
        yield name, asyncio.run(fuzz(server, draw(kind(server.model), count, seed), is_known))


def fuzz_admin(server: Server, count: int, seed: int) -> Iterator[tuple[str, Found]]:
    """Requests to the admin routes; orders that are right are carried out. Yields what comes of
    them.
    """
    document = server.http.get("/openapi.json").json()
    yield (
        "HTTP: admin routes",
        asyncio.run(fuzz(server, draw(admin_requests(document), count, seed))),
    )


def show(name: str, statuses: Counter[Any], failures: int, report: str) -> None:
    """Print the row of a kind as soon as it is known, and below it what there is to say."""
    shown = ", ".join(f"{status}: {count}" for status, count in sorted(statuses.items()))
    sys.stdout.write(f"| {name} | {statuses.total()} | {shown} | {failures} |\n{report}")
    sys.stdout.flush()


def main() -> int:
    """Run as a program. Returns 1 if something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m tests.deep.fuzz.run")
    parser.add_argument("--cases", type=int, default=100_000, help="how many cases")
    parser.add_argument("--seed", type=int, default=0, help="which ones")
    parser.add_argument(
        "--stock", action="store_true", help="send what gets 5xx to stock vLLM, and compare"
    )
    parser.add_argument("--save", type=Path, help="write what fails there, one JSON object a line")
    args = parser.parse_args()
    over_http, model = max(1, args.cases // SHARE), tiny("llama")
    started_s, cases, failed, failures = time.monotonic(), 0, False, list[Failure]()
    sys.stdout.write("| what | cases | statuses | failures |\n|---|---|---|---|\n")
    is_known = (lambda *_: None) if args.stock else fails_in_stock
    for flags, kinds in (
        (SETTINGS, partial(fuzz_requests, is_known=is_known)),
        (COMMON, fuzz_admin),
    ):
        with Server(model, 2, *flags) as server:
            for name, one in kinds(server, over_http, args.seed):
                show(name, one.statuses, len(one.failures) + len(one.wrong), f"{one.report()}\n")
                cases += one.statuses.total()
                failed |= bool(one.wrong)
                failures += one.failures
            end_is_clean(server)
    for name, tally in fuzz_pure(args.cases - 3 * over_http, args.seed):
        show(
            name,
            tally.statuses,
            len(tally.failures),
            "".join(f"{text}\n" for text in tally.failures[:20]),
        )
        cases += tally.statuses.total()
        failed |= bool(tally.failures)
    sys.stdout.write(f"\n{cases} cases in {time.monotonic() - started_s:.0f} s, seed {args.seed}\n")
    if args.save is not None:
        save(failures, args.save)
    if args.stock and failures:
        failures = asyncio.run(only_ours(failures))
    return 1 if failed or failures else 0


def save(failures: list[Failure], path: Path) -> None:
    """Write requests that failed, with their answers, one JSON object a line."""
    rows = [
        {"path": s.path, "body": s.content.decode("latin-1"), "status": c, "text": t}
        for s, c, t in failures
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


async def only_ours(failures: list[Failure]) -> list[Failure]:
    """Those that stock vLLM does not answer with 5xx too."""
    found, compared = [], Counter[str]()
    with Server(
        tiny("llama"), 1, *COMMON, "--enforce-eager", base=FLAGS[1:], program=STOCK
    ) as stock:
        async with client_of(stock) as http:
            for sent, status, text in failures:
                theirs, their_text = await send(http, sent)
                compared[
                    f"{sent.path}: ours {status} {text[:160]!r}, stock {theirs} "
                    f"{their_text[:160]!r}\n"
                ] += 1
                if theirs < 500:
                    found.append((sent, status, text))
    sys.stdout.writelines(f"{count} x {line}" for line, count in compared.items())
    sys.stdout.write(f"{len(failures)} with 5xx, of which {len(found)} only here\n")
    return found


if __name__ == "__main__":
    sys.exit(main())
