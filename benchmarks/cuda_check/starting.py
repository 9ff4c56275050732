"""A server of the check that starts in a thread of its own, and what its log says of the start."""

import re
import threading
import time

from benchmarks.cuda_check.asking import PROMPTS, ask
from benchmarks.cuda_check.lines import Outcome, Result
from harness.live import Server

TOLD = re.compile(
    r"(?:lane 1: compiled steps|group of \d+: CUDA graphs|lanes) equal .*? within [\d.e+-]+"
    r"|group of \d+: \d+ CUDA graphs of .*"
    r"|(?:lane 1: steps run the model's own code|group of \d+: steps have no CUDA graphs): .*"
    r"|group size \d+ is not offered: .*"
)
"""What a log says of graphs, compiled code and groups."""
TELLING = re.compile(r"(?:Error|error|flying-serving): ")
MOST_CHARACTERS = 300


class Begun:
    """A server from its start on.

    `ready_s`: the time within which it is ready and has answered one request. That one is random,
    so that the kernels which a first answer compiles are there. `names_all`: the server's tokenizer
    has a name for each token of its model, which logprobs need.
    """

    def __init__(self, name: str, server: Server, ready_s: float, *, names_all: bool) -> None:
        self.server = server
        self.outcome: Outcome | None = None
        """None while it starts."""
        self._name = f"start of {name}"
        self._ready_s = ready_s
        self._logprobs = 0 if names_all else None
        self._began_s = time.monotonic()
        threading.Thread(target=self._start, daemon=True).start()

    def _start(self) -> None:
        try:
            took_s = self.server.wait_until_ready(self._ready_s)
            asked_s = time.monotonic()
            ask(self.server, PROMPTS[0], temperature=1.0, seed=1, logprobs=self._logprobs)
        except Exception as error:  # noqa: BLE001 - whatever a start raises, others go on
            why = why_not_started(self.server.log(), error)
            self._end(Result.FAILED, why)
        else:
            answer_s = time.monotonic() - asked_s
            told = said(self.server.log())
            figure = f"ready after {took_s:.0f} s, an answer {answer_s:.1f} s later"
            self._end(Result.PASSED, "; ".join([figure, *told])[:MOST_CHARACTERS])

    def _end(self, result: Result, figure: str) -> None:
        took_s = time.monotonic() - self._began_s
        self.outcome = Outcome(self._name, result, figure, took_s)


def said(log: str) -> list[str]:
    """Return what a log says of graphs, compiled code and groups, each once."""
    return list(dict.fromkeys(found.group().rstrip() for found in TOLD.finditer(log)))


def why_not_started(log: str, error: Exception) -> str:
    """Return the last line of a log that names an error, or what was raised."""
    lines = [line.strip() for line in log.splitlines() if TELLING.search(line)]
    raised = " ".join(str(error).split()) or type(error).__name__
    return (lines[-1] if lines else raised)[-MOST_CHARACTERS:]
