"""Requests with adapters in a lane's scheduler: those of an adapter that an engine lacked end with
an error.
"""

from collections.abc import Iterator

import pytest
from vllm.v1.request import Request, RequestStatus

from tests.with_vllm.engine.schedulers import Hooks
from tests.with_vllm.vllm_adapter.lanes import Lane, make

BUSY, OTHER = 1, 2
"""Adapters."""


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """vLLM reads a machine's cores when it makes a configuration."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    yield


@pytest.fixture(params=[False, True], ids=["one step", "two steps under way"])
def overlaps(request: pytest.FixtureRequest) -> bool:
    """Synchronous and asynchronous scheduling."""
    found: bool = request.param
    return found


class Failing:
    """A lane whose engine lacks adapters, and the requests that end with an error."""

    def __init__(self, *, overlaps: bool) -> None:
        self.lane = Lane(overlaps=overlaps, max_loras=2)
        self.now_s = 100.0
        self.lacking: dict[int, tuple[float, str]] = {}
        self.ended: dict[str, str] = {}
        scheduler = self.lane.scheduler
        scheduler.clock = lambda: self.now_s
        scheduler.adapter_failure = self._failure
        scheduler.hooks = Hooks(requests_failed=self._failed)

    def _failure(self, adapter: int, since_s: float) -> str | None:
        at_s, why = self.lacking.get(adapter, (-1.0, ""))
        return why if at_s >= since_s else None

    def _failed(self, requests: list[Request], why: str) -> None:
        assert all(request.status == RequestStatus.FINISHED_ERROR for request in requests)
        self.ended |= {request.request_id: why for request in requests}

    def add(self, name: str, adapter: int | None, family: int, prompt: int = 5) -> Request:
        made = make(name, family, prompt, 6, adapter=adapter)
        self.lane.scheduler.add_request(made)
        return made


def test_all_requests_of_the_adapter_end_with_the_error(overlaps: bool) -> None:
    """Those that wait too; no token of the step is taken, and the others go on."""
    failing = Failing(overlaps=overlaps)
    first = failing.add("first", BUSY, 1)
    failing.add("other", OTHER, 2)
    failing.add("base", None, 3)
    failing.lane.step()
    failing.lane.settle()
    had = first.num_output_tokens
    for number in range(4):
        failing.add(f"late {number}", BUSY, 4 + number)
    failing.lacking[BUSY] = failing.now_s, "no file"
    failing.lane.schedule()
    failing.lane.settle()
    assert set(failing.ended) == {"first", *(f"late {number}" for number in range(4))}
    assert set(failing.ended.values()) == {"no file"}
    assert first.num_output_tokens == had
    failing.lacking.clear()
    while failing.lane.scheduler.requests:
        failing.lane.step()
    failing.lane.settle()
    failing.lane.pool.check(set())
    assert failing.lane.free() == failing.lane.pool.total


def test_blocks_of_such_a_step_are_no_prefixes(overlaps: bool) -> None:
    """They were computed without the adapter."""
    failing = Failing(overlaps=overlaps)
    failing.add("first", BUSY, 1, prompt=8)
    failing.lacking[BUSY] = failing.now_s, "no file"
    failing.lane.step()
    failing.lane.settle()
    assert set(failing.ended) == {"first"}
    failing.lacking.clear()
    failing.add("again", BUSY, 1, prompt=8)
    failing.lane.step()
    assert failing.lane.scheduler.cached_tokens == {"again": 0}


def test_a_failure_of_before_ends_no_request(overlaps: bool) -> None:
    failing = Failing(overlaps=overlaps)
    failing.lacking[BUSY] = failing.now_s, "no file"
    failing.now_s += 1
    failing.add("later", BUSY, 1)
    while failing.lane.scheduler.requests:
        failing.lane.step()
    failing.lane.settle()
    assert failing.ended == {}
