"""Find out what becomes of one model: make its checkpoint, start the server, ask its lanes, ask
stock vLLM.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from zoo import cache
from zoo.architectures import Model, model_class
from zoo.forced import FORCED_AFTER, FORCED_BATCH, PROCESSOR
from zoo.lanes import Ended, Server
from zoo.processes import fork, write_json
from zoo.quantized import answer_all, dtype_of, kv_dtype_of, write_model
from zoo.requests import AFTER, BATCH, Request
from zoo.stock import ENVIRONMENT
from zoo.verdict import BUILD, PLAIN, QUANTIZED, STOCK, Measure, Outcome, Row, needs, verdict_on

REFUSAL = 2
"""Exit code of `flying-serving` with one line that tells a user what to do."""
_PREFIX = "flying-serving: "
_LANE = "this lane"
"""In what the self-check of lanes says."""
_ELSEWHERE = "Please check the logs"
_RAISED = re.compile(r"(?:^|[\s\]])((?:\w+\.)*\w*(?:Error|Exception|Lost|Timeout))(?::\s*(.*))?$")
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')


def row_of(model: Model) -> Row | None:
    """What became of the model, from what is kept; None if something is still to be asked."""
    name = (model.architecture, model.variant)
    if model_class(model.architecture) is None and not model.is_native:
        return Row(
            *name,
            BUILD,
            detail="transformers has no class for it, and the zoo no configuration for vLLM's",
        )
    lanes = cache.load(model, "lanes")
    if lanes is None:
        return None
    if lanes["status"] == "no checkpoint":
        if model.is_native:
            return Row(*name, STOCK, detail=f"stock vLLM: {lanes['reason']}")
        return Row(*name, BUILD, detail=f"transformers cannot build it: {lanes['reason']}")
    measure = measure_of(model)
    stock = {degree: cache.load(model, f"stock-{degree}") for degree in needs(lanes, measure)}
    asked = {degree: outcome for degree, outcome in stock.items() if outcome is not None}
    if len(asked) < len(stock):
        return None
    return replace(verdict_on(name, lanes, asked, measure), quantized=model.quantized)


def measure_of(model: Model) -> Measure:
    """What is asked of a model."""
    return QUANTIZED if model.is_rounded else PLAIN


def stock_failed(model: Model) -> list[str]:
    """What is kept of stock vLLM that has no answers."""
    kept = {kind: cache.load(model, kind) for kind in cache.KINDS if kind.startswith("stock")}
    return [
        kind for kind, outcome in kept.items() if outcome is not None and outcome["answers"] is None
    ]


def survey(model: Model, limit_s: float) -> None:
    """Ask what is not known of a model yet and keep it. Takes at most the limit, and what ending
    processes takes.
    """
    asking = _Asking(model, time.monotonic() + limit_s)
    lanes = cache.load(model, "lanes") or asking.lanes()
    if lanes["status"] != "no checkpoint":
        for degree in needs(lanes, measure_of(model)):
            if cache.load(model, f"stock-{degree}") is None:
                asking.stock(degree)


class _Asking:
    def __init__(self, model: Model, deadline: float) -> None:
        self._model = model
        self._deadline = deadline
        self._path = cache.path_of(model, "checkpoint")

    def lanes(self) -> Outcome:
        """What becomes of the server."""
        outcome: Outcome = {
            "status": "served",
            "reason": "",
            "sizes": [],
            "alone": "",
            "answers": {},
        }
        reason, degrees = self._checkpoint(), measure_of(self._model).degrees
        if reason is not None:
            outcome |= {"status": "no checkpoint", "reason": reason}
        else:
            try:
                flags, requests = self._asked(degrees[-1])
                log = cache.log_of(self._model, "serve")
                with Server(self._path, log, self._deadline, *flags, *self._model.flags) as server:
                    outcome["sizes"], not_offered = server.group_sizes()
                    asked = [degree for degree in degrees if degree in outcome["sizes"]]
                    outcome["answers"] = {
                        str(degree): server.answers(degree, requests) for degree in asked
                    }
                outcome["alone"] = not_offered.get(degrees[-1], "")
            except Ended as ended:
                outcome |= _end_of(ended)
        write_json(cache.path_of(self._model, "lanes"), outcome)
        return outcome

    def _asked(self, engines: int) -> tuple[tuple[str, ...], Sequence[Sequence[Request]]]:
        """Return the flags of a server, and the requests that it gets."""
        flags = (f"--data-parallel-size={engines}", f"--dtype={dtype_of(self._model)}")
        if self._model.is_rounded:
            of_kv = f"--kv-cache-dtype={kv_dtype_of(self._model)}"
            flags = (*flags, f"--logits-processors={PROCESSOR}", of_kv)
            return flags, (FORCED_BATCH, FORCED_AFTER)
        return flags, (BATCH, AFTER)

    def stock(self, degree: int) -> None:
        """What stock vLLM answers."""
        path = cache.path_of(self._model, f"stock-{degree}")
        out = path.with_suffix(".part")
        out.unlink(missing_ok=True)
        self._checkpoint()
        work = lambda: answer_all(self._model, self._path, degree, out)  # noqa: E731 - to be run in a fork of this very process
        status, log = self._forked(f"stock-{degree}", work, ENVIRONMENT)
        answers = json.loads(out.read_text(encoding="utf-8")) if status == 0 else None
        out.unlink(missing_ok=True)
        if status is not None:
            reason = "" if answers else cause_of_end(status, log)
            write_json(path, {"answers": answers, "reason": reason})

    def _checkpoint(self) -> str | None:
        """Make the checkpoint if it is not there; why it cannot be made, else None."""
        if self._path.exists():
            return None
        status, log = self._forked(
            "checkpoint", lambda: write_model(self._model, self._path), ENVIRONMENT
        )
        return None if status == 0 else cause_of_end(status, log)

    def _forked(
        self, what: str, work: Callable[[], None], environment: dict[str, str]
    ) -> tuple[int | None, str]:
        """Run `work` in a process; its exit code, None if its time is over, and its log."""
        process = fork(work, cache.log_of(self._model, what), environment)
        try:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, self._deadline - time.monotonic()))
            status = process.returncode
        finally:
            process.kill()
        return status, process.text()


def _end_of(ended: Ended) -> Outcome:
    said = refusal(ended)
    if said is not None:
        return {"status": "differs" if _LANE in said else "refused", "reason": said}
    reason = cause_of_end(ended.status, ended.log)
    return {"status": "overdue" if ended.overdue else "failed", "reason": reason}


def refusal(ended: Ended) -> str | None:
    """The one line with which the server refuses a model; None if it ended otherwise, or an
    exception is no reason.
    """
    last = ended.log.rstrip().rsplit("\n", 1)[-1]
    if (
        ended.status != REFUSAL
        or not last.startswith(_PREFIX)
        or _RAISED.search(last)
        or _ELSEWHERE in last
    ):
        return None
    return last.removeprefix(_PREFIX)


def cause_of_end(status: int | None, log: str) -> str:
    """Why a process ended: the signal that killed it, if its log has no exception."""
    cause = root_cause(log)
    if status is None or status >= 0 or _RAISED.match(cause):
        return cause
    return f"killed by {signal.Signals(-status).name}"


def root_cause(log: str) -> str:
    """The first exception of a log, and where it was raised; the log's last line if there is none,
    or it has one.
    """
    frame = ""
    last = log.rstrip().rsplit("\n", 1)[-1]
    if last.startswith(_PREFIX):
        return last.removeprefix(_PREFIX)
    for line in log.splitlines():
        place, raised = _FRAME.search(line), _RAISED.search(line)
        if place:
            frame = f" ({Path(place[1]).name}:{place[2]}, {place[3]})"
        elif raised and frame:
            return f"{raised[1].rsplit('.', 1)[-1]}: {(raised[2] or '')[:300]}{frame}"
    return (last or "it said nothing")[:300]
