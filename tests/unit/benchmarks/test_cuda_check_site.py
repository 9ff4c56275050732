"""The servers of the check: begun together, told of when they are ready, ended one by one."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.cuda_check import site as sites
from benchmarks.cuda_check import starting
from benchmarks.cuda_check.lines import Result
from benchmarks.cuda_check.site import Site, Spec
from benchmarks.cuda_check.starting import said, why_not_started
from flying_serving.errors import ServerFailed
from harness.live import wait_until

NO_LIMIT_S = 60.0


class StandIn:
    """A server in a few words."""

    def __init__(self, *, starts: bool) -> None:
        self.stopped = self.killed = False
        self._starts = starts

    def wait_until_ready(self, timeout_s: float) -> float:
        if not self._starts:
            raise ServerFailed("the server ended")
        return 3.0

    def log(self) -> str:
        return "lanes equal lane 1 within 9.1e-05; and so on" if self._starts else "Error: bad\nend"

    def stop(self) -> None:
        self.stopped = True

    def kill(self) -> None:
        self.killed = True


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> list[StandIn]:
    """Servers in the order in which they start; that of `bad` does not."""
    found: list[StandIn] = []

    def start(site: Site, name: str) -> StandIn:
        found.append(StandIn(starts=name != "bad"))
        return found[-1]

    made = dict.fromkeys(("a", "b", "bad"), Spec(0, ()))
    monkeypatch.setattr(sites, "specs", lambda has_gpu: made)
    monkeypatch.setattr(Site, "_start", start)
    monkeypatch.setattr(sites, "_kill", StandIn.kill)
    monkeypatch.setattr(starting, "ask", lambda server, prompt, **fields: {})
    return found


@pytest.fixture
def site(servers: list[StandIn], tmp_path: Path) -> Site:
    return Site(tmp_path / "logs", NO_LIMIT_S, has_gpu=True)


def started(site: Site, *names: str) -> list[tuple[str, Result, str]]:
    """Begin servers, and return what became of them."""
    found: list[Any] = []
    site.begin(names)

    def told() -> bool:
        found.extend(site.starts())
        return not site.starting()

    wait_until(told)
    return sorted((one.name, one.result, one.figure) for one in found)


def test_a_start_tells_its_time_and_what_the_log_says(site: Site) -> None:
    ((name, result, figure),) = started(site, "a")
    assert (name, result) == ("start of a", Result.PASSED)
    assert figure.startswith("ready after 3 s, an answer ")
    assert " -" not in figure
    assert figure.endswith("; lanes equal lane 1 within 9.1e-05")


@pytest.mark.parametrize(("large", "logprobs"), [(False, 0), (True, None)])
def test_a_model_whose_tokens_have_no_names_is_asked_without_logprobs(
    large: bool,
    logprobs: int | None,
    servers: list[StandIn],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(sites, "specs", lambda has_gpu: {"a": Spec(1, (), large=large)})
    monkeypatch.setattr(starting, "ask", lambda server, prompt, **fields: asked.append(fields))
    started(Site(tmp_path / "logs", NO_LIMIT_S, has_gpu=True), "a")
    assert [fields["logprobs"] for fields in asked] == [logprobs]


def test_a_server_that_does_not_start_is_lost_and_not_tried_again(
    site: Site, servers: list[StandIn]
) -> None:
    _, bad = started(site, "a", "bad")
    assert bad == ("start of bad", Result.FAILED, "Error: bad")
    assert (site.why_lost("a"), site.why_lost("bad")) == (None, "Error: bad")
    site.begin(["a", "bad"])
    assert len(servers) == 2
    assert servers[1].stopped


def test_others_are_ended(site: Site, servers: list[StandIn]) -> None:
    started(site, "a", "b")
    site.end_others(["b"])
    site.end()
    assert [server.stopped for server in servers] == [True, True]
    started(site, "a")
    assert len(servers) == 3


def test_what_is_given_up_is_killed_alone_and_starts_again(
    site: Site, servers: list[StandIn]
) -> None:
    started(site, "a", "b")
    site.give_up(["a"])
    assert [server.killed for server in servers] == [True, False]
    assert [name for name, *_ in started(site, "a", "b")] == ["start of a"]
    site.end()


def test_said_has_graphs_compiled_code_and_groups_once() -> None:
    lines = (
        "engine 0: lane 1: compiled steps equal eager steps within 3.1e-02",
        "engine 0: group of 1: CUDA graphs equal eager steps within 0.0e+00",
        "engine 1: group of 1: CUDA graphs equal eager steps within 0.0e+00",
        "group size 4 is not offered: heads",
        "something else",
    )
    assert said("\n".join(lines)) == [
        "lane 1: compiled steps equal eager steps within 3.1e-02",
        "group of 1: CUDA graphs equal eager steps within 0.0e+00",
        "group size 4 is not offered: heads",
    ]


def test_what_was_raised_is_told_where_a_log_names_no_error() -> None:
    assert why_not_started("nothing", TimeoutError()) == "TimeoutError"
    assert why_not_started("ValueError: a\nRuntimeError: b\nmore", TimeoutError()) == (
        "RuntimeError: b"
    )
