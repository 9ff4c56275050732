"""What a server of two engines answers, in each of its lanes: the real server, over HTTP."""

from __future__ import annotations

import re
import subprocess
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import httpx

from flying_deploy.ports import HOST, ReservedPort
from flying_lab.server_process import ServerProcess
from flying_serving.errors import ServerFailed
from zoo.architectures import MAX_MODEL_LEN
from zoo.processes import fork
from zoo.requests import Request

FLAGS = (
    "--policy=manual",
    "--enforce-eager",
    f"--max-model-len={MAX_MODEL_LEN}",
    "--block-size=32",
    "--max-num-batched-tokens=256",
    "--max-num-seqs=8",
    "--kv-cache-memory-bytes=67108864",
)
TOKEN_ID = "token_id:"
_STEPS = re.compile(r'^flying:step_duration_seconds_count\{.*group_size="(\d+)".*\} (\S+)$', re.M)


class Ended(Exception):
    """The server is not there, or does not answer: its exit code, its log, and whether its time was
    over.
    """

    def __init__(self, status: int | None, log: str, overdue: bool = False) -> None:
        super().__init__(f"the server ended with {status}")
        self.status = status
        self.log = log
        self.overdue = overdue


class Server(ServerProcess):
    """`flying-serving serve` in a forked process, and an HTTP client for it. Use it as a context
    manager.

    `flags`: of `serve`, beside FLAGS. Raises Ended if it is not ready by the deadline (of the
    monotonic clock).
    """

    def __init__(self, model: Path, log: Path, deadline: float, *flags: str) -> None:
        port = ReservedPort()
        argv = [str(model), f"--host={HOST}", f"--port={port.number}", *FLAGS, *flags]
        start = lambda environment, log: fork(lambda: _serve(argv), log, environment)  # noqa: E731
        super().__init__(start, {}, port, log)
        self._deadline = deadline
        self._http = httpx.Client(base_url=self.url, timeout=60)
        self._model = str(model)

    def __enter__(self) -> Self:
        try:
            self.wait_until_ready(self._deadline - time.monotonic())
        except ServerFailed:
            status = self.process.poll()
            self.stop()
            raise Ended(status, self.log(), overdue=status is None) from None
        return self

    def stop(self) -> bool:
        """End it."""
        self._http.close()
        return super().stop()

    def group_sizes(self) -> tuple[list[int], dict[int, str]]:
        """The sizes of groups that the server has lanes for, and why it has none for others."""
        status = self._http.get("/flying/status").raise_for_status().json()
        return list(status["group_sizes"]), {
            int(size): reason for size, reason in status["not_offered"].items()
        }

    def answers(self, degree: int, requests: Sequence[Sequence[Request]]) -> dict[str, Any]:
        """Ask all requests of the lanes of one degree, some together, the others afterwards. Raises
        Ended if the server ends of it, or others have answered.
        """
        found: dict[str, Any] = {}
        before = self._steps()
        try:
            for together in requests:
                with ThreadPoolExecutor(len(together)) as pool:
                    asked = {
                        request.name: pool.submit(self._ask, request, degree)
                        for request in together
                    }
                found |= {name: answer.result() for name, answer in asked.items()}
        except httpx.HTTPError as error:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(1.0)
            log = f"{self.log()}\n{error!r} {_body(error)}"
            raise Ended(
                self.process.poll(), log, overdue=isinstance(error, httpx.TimeoutException)
            ) from None
        stepped = {size for size, count in self._steps().items() if count > before.get(size, 0)}
        if stepped != {degree}:  # with one device for each engine that is the group size
            raise Ended(
                None, f"requests of degree {degree} ran in groups of {sorted(stepped)} engines"
            )
        return found

    def _steps(self) -> dict[int, int]:
        """Steps that have been made, by group size."""
        count: Counter[int] = Counter()
        text = self._http.get("/metrics").raise_for_status().text
        for size, steps in _STEPS.findall(text):
            count[int(size)] += int(float(steps))
        return count

    def _ask(self, request: Request, degree: int) -> dict[str, Any]:
        sampling = request.sampling()
        body = {
            "model": self._model,
            "prompt": list(request.prompt),
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "vllm_xargs": {"tp_degree": degree, **sampling.pop("extra_args", {})},
            **sampling,
        }
        timeout_s = max(1.0, self._deadline - time.monotonic())
        choice = (
            self._http.post("/v1/completions", json=body, timeout=timeout_s)
            .raise_for_status()
            .json()["choices"][0]
        )
        logprobs = choice["logprobs"]
        return {
            "tokens": choice["token_ids"],
            "logprobs": logprobs["token_logprobs"],
            "top": [
                [[int(token.removeprefix(TOKEN_ID)), value] for token, value in step.items()]
                for step in logprobs["top_logprobs"]
            ],
        }


def _serve(argv: list[str]) -> None:
    import sys

    from flying_serving.cli import main

    sys.argv = ["flying-serving", "serve", *argv]
    main.main()


def _body(error: httpx.HTTPError) -> str:
    return error.response.text[:2000] if isinstance(error, httpx.HTTPStatusError) else ""
