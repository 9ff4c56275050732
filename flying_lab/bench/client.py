"""Open-loop replay: each request is sent at its time, even if earlier requests fail or are late."""

import asyncio
import gc
import io
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import aiohttp
import msgspec

from flying_lab.results.lag import LagMeter
from flying_lab.results.record import Record
from flying_lab.sse import Event, EventStream
from flying_lab.workload.model import Workload

CONNECT_S = 30.0
LARGE_BYTES = 2**20
ERROR_CHARACTERS = 500
CLOCK_SAMPLES = 5
INTERRUPTED = "cut off: the replay was stopped"


@dataclass(frozen=True)
class Target:
    """The server that requests go to."""

    url: str
    """The base of its URL, without `/v1`."""
    api_key: str = field(default="", repr=False)

    @property
    def headers(self) -> dict[str, str]:
        """The headers of each request."""
        key = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return {"Content-Type": "application/json", **key}

    def session(self) -> aiohttp.ClientSession:
        """Open a session with one connection for each request: a client that is late would use one
        that the server closes.
        """
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            headers=self.headers,
        )


class BodySource(Protocol):
    """Bodies by their place in the workload."""

    def __getitem__(self, position: int, /) -> bytes: ...


class Replay:
    """One replay of a workload. `records` and the counts are up to date while it runs.

    `bodies` are in the workload's order; a request that takes longer than `timeout_s` is
    unfinished.
    """

    def __init__(
        self, workload: Workload, bodies: BodySource, target: Target, timeout_s: float
    ) -> None:
        self.records = [Record(request) for request in workload.requests]
        self.lag = LagMeter()
        self.started_wall_s = 0.0
        self.sent = self.done = self.failed = self.tokens = 0
        self._bodies = bodies
        self._target = target
        self._url = target.url + "/v1/completions"
        self._timeout_s = timeout_s
        self._start_s = 0.0
        self._until_stopped = asyncio.Timeout(None)

    @property
    def elapsed_s(self) -> float:
        """Return the seconds since the replay began."""
        return time.perf_counter() - self._start_s

    def wall_drift_s(self) -> float:
        """Return the seconds by which the wall clock has gone further since the start than time
        has: it may be set meanwhile.
        """
        now_s, wall_s = clocks_together()
        return (wall_s - self.started_wall_s) - (now_s - self._start_s)

    def stop(self) -> None:
        """Send nothing more and cut off running requests; `run` then returns."""
        if not self._until_stopped.expired():
            self._until_stopped.reschedule(0.0)

    async def run(self) -> None:
        """Send everything and wait until every request has ended. An error that is no answer to a
        request ends it.
        """
        async with self._target.session() as session:
            with _few_collections():
                self._start_s, self.started_wall_s = clocks_together()
                self.lag.start()
                try:
                    async with self._until_stopped, asyncio.TaskGroup() as requests:
                        await self._send_all(session, requests)
                except TimeoutError:
                    pass  # it was stopped
                except BaseExceptionGroup as errors:
                    raise errors.exceptions[0] from None
                finally:
                    self.lag.stop()

    async def _send_all(self, session: aiohttp.ClientSession, requests: asyncio.TaskGroup) -> None:
        for position, record in enumerate(self.records):
            # also without time to wait: in a flood of requests, answers are still read
            await asyncio.sleep(max(0.0, record.request.arrival_s - self.elapsed_s))
            requests.create_task(self._request(session, position, record))

    async def _request(self, session: aiohttp.ClientSession, position: int, record: Record) -> None:
        record.error = INTERRUPTED
        record.sent_s = self.elapsed_s
        self.lag.sent(record.sent_s - record.request.arrival_s)
        self.sent += 1
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._replay_one(session, self._bodies[position], record)
        except TimeoutError:
            record.error = f"took longer than {self._timeout_s:g} s"
        except (aiohttp.ClientError, OSError, msgspec.DecodeError, ValueError) as error:
            record.status, record.error = "failed", _text(f"{type(error).__name__}: {error}")
        finally:
            record.end_s = self.elapsed_s
            self.done += 1
            self.failed += record.status == "failed"

    async def _replay_one(
        self, session: aiohttp.ClientSession, body: bytes, record: Record
    ) -> None:
        """Send one request and read its answer to the end."""
        # aiohttp wants large bodies as files
        data = io.BytesIO(body) if len(body) > LARGE_BYTES else body
        async with session.post(self._url, data=data) as answer:
            record.first_byte_s = self.elapsed_s
            record.http_status = answer.status
            if answer.status != 200:
                record.status = "failed"
                record.error = _text(
                    f"{answer.status}: {(await answer.read()).decode(errors='replace')}"
                )
                return
            stream = EventStream()
            async for part in answer.content.iter_any():
                now_s = self.elapsed_s
                for event in stream.feed(part):
                    self._note(record, event, now_s)
            if record.status != "failed":
                _complete(record, stream.done)

    def _note(self, record: Record, event: Event, now_s: float) -> None:
        """Add the tokens, counts or error of one event to a record."""
        if event.error is not None:
            record.status, record.error = "failed", _text(str(event.error))
        if event.usage is not None:
            record.usage_tokens = event.usage.completion_tokens
        if event.metrics is not None and event.metrics.queue_time_ms is not None:
            record.queue_s = event.metrics.queue_time_ms / 1e3
        for choice in event.choices:
            if tokens := choice.tokens:
                record.token_s.append(now_s)
                record.token_counts.append(tokens)
                self.tokens += tokens
            record.finish_reason = choice.finish_reason or record.finish_reason


def _complete(record: Record, done: bool) -> None:
    """Mark a record `ok` if its answer is complete, and otherwise note the reason."""
    asked, received = record.request.output_tokens, record.output_tokens
    if not done:
        record.error = f"the stream ended without [DONE] after {received} of {asked} tokens"
    elif received != asked or not record.token_s:
        record.error = (
            f"{received} of {asked} tokens received, finish_reason {record.finish_reason}"
        )
    else:
        record.status, record.error = "ok", None


def _text(message: str) -> str:
    """Return a message on one line, not too long."""
    return " ".join(message.split())[:ERROR_CHARACTERS]


@contextmanager
def _few_collections() -> Iterator[None]:
    """Exclude existing objects from garbage collection: its pauses would be the client's lag."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def clocks_together() -> tuple[float, float]:
    """Return (time.perf_counter(), time.time()) of the same moment. Requests are timed by one, logs
    of servers by the other.

    Between two readings a process may wait for a processor, on a busy machine for longer than a
    token takes. So the closest of a few pairs of readings counts.
    """
    closest_s, found = float("inf"), (0.0, 0.0)
    for _ in range(CLOCK_SAMPLES):
        before, wall, after = time.perf_counter(), time.time(), time.perf_counter()
        if after - before < closest_s:
            closest_s, found = after - before, ((before + after) / 2, wall)
    return found
