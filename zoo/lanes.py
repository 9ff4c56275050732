"""What a server of two engines answers, in each of its lanes: the real server, over HTTP."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from zoo.architectures import MAX_MODEL_LEN
from zoo.processes import Forked, fork, free_port
from zoo.requests import AFTER, BATCH, Request

FLAGS = (
    "--data-parallel-size=2",
    "--policy=manual",
    "--dtype=float32",
    "--enforce-eager",
    f"--max-model-len={MAX_MODEL_LEN}",
    "--block-size=32",
    "--max-num-batched-tokens=256",
    "--max-num-seqs=8",
    "--kv-cache-memory-bytes=67108864",
)
TOKEN_ID = "token_id:"


class Ended(Exception):
    """The server is not there, or does not answer: its exit code, its log, and whether its time was over."""

    def __init__(self, status: int | None, log: str, late: bool = False) -> None:
        super().__init__(f"the server ended with {status}")
        self.status = status
        self.log = log
        self.late = late


class Server:
    """`flying-serving serve` in a forked process, and an HTTP client for it. Use it as a context manager.

    Raises Ended if it is not ready by the deadline (of the monotonic clock).
    """

    def __init__(self, model: Path, log: Path, deadline: float) -> None:
        self._port = free_port()
        words = [str(model), "--host=127.0.0.1", f"--port={self._port}", *FLAGS]
        self._deadline = deadline
        self._process: Forked = fork(lambda: _serve(words), log, {})
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{self._port}", timeout=60)
        self._model = str(model)

    def __enter__(self) -> Server:
        while time.monotonic() < self._deadline:
            if self._process.ended():
                self.__exit__()
                raise Ended(self._process.status, self._process.text())
            try:
                if self._http.get("/health", timeout=2).status_code == 200:
                    return self
            except httpx.HTTPError:
                pass
            time.sleep(0.1)
        self.__exit__()
        raise Ended(None, self._process.text(), late=True)

    def __exit__(self, *_: object) -> None:
        self._http.close()
        self._process.end()

    def group_sizes(self) -> tuple[list[int], dict[int, str]]:
        """The sizes of groups that the server has lanes for, and why it has none for others."""
        status = self._http.get("/flying/status").raise_for_status().json()
        return list(status["group_sizes"]), {int(size): reason for size, reason in status["not_offered"].items()}

    def answers(self, degree: int) -> dict[str, Any]:
        """Ask everything of the lanes of one degree. Raises Ended if the server ends of it."""
        found: dict[str, Any] = {}
        try:
            for requests in (BATCH, AFTER):
                with ThreadPoolExecutor(len(requests)) as pool:
                    asked = {request.name: pool.submit(self._ask, request, degree) for request in requests}
                found |= {name: answer.result() for name, answer in asked.items()}
        except httpx.HTTPError as error:
            self._process.wait(1.0)
            log = f"{self._process.text()}\n{error!r} {_body(error)}"
            raise Ended(self._process.status, log, late=isinstance(error, httpx.TimeoutException)) from None
        return found

    def _ask(self, request: Request, degree: int) -> dict[str, Any]:
        body = {
            "model": self._model,
            "prompt": list(request.prompt),
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "vllm_xargs": {"tp_degree": degree},
            **request.sampling(),
        }
        timeout_s = max(1.0, self._deadline - time.monotonic())
        choice = (
            self._http.post("/v1/completions", json=body, timeout=timeout_s).raise_for_status().json()["choices"][0]
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


def _serve(words: list[str]) -> None:
    import sys

    from flying_serving.cli import main

    sys.argv = ["flying-serving", "serve", *words]
    main.main()


def _body(error: httpx.HTTPError) -> str:
    return error.response.text[:2000] if isinstance(error, httpx.HTTPStatusError) else ""
