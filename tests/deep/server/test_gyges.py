"""Policy `gyges` in a live server of eight engines, which are alone or in groups of four.

Each engine has 64 blocks of 32 tokens beside vLLM's null block, so 2,048 tokens; a group has 8,192.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from harness.live import BLOCK_BYTES, Server, wait_until
from harness.losing import is_whole, kill
from harness.streams import WORST_LOGPROB, worst_difference
from tests.deep.conformance.live import Asked, Case, Job, Live
from tests.stock.requests import REQUESTS, tokens

pytestmark = pytest.mark.server

SETTINGS = (
    "--policy=gyges",
    "--group-sizes=1,4",
    "--max-model-len=2500",
    "--max-num-batched-tokens=512",
    f"--kv-cache-memory-bytes={65 * BLOCK_BYTES}",
    "--no-enable-prefix-caching",
)
CASE = Case(
    "gyges",
    "llama",
    8,
    (),
    jobs=tuple(map(Job, REQUESTS)),
    flags=SETTINGS,
    without=("--policy", "--max-model-len", "--max-num-batched-tokens", "--kv-cache-memory-bytes"),
)
DEGREES = (1, 4)
ALONE = [[engine] for engine in range(8)]
WAIT_S = 120.0
ROUNDS = 3


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with Live(CASE, tmp_path_factory.mktemp("case")) as live:
        yield live


@pytest.fixture
def before(server: Server) -> int:
    """How many switches there have been once the engines are alone and nothing runs."""
    server.until_idle()
    wait_until(lambda: server.status()["layout"] == ALONE, server.switches)
    return len(server.switches())


def joins_since(server: Server, count: int) -> list[str]:
    """Why engines have joined after the first `count` switches."""
    switches = server.switches()[count:]
    return [one["reason"] for one in switches if len(one["to"]) < len(one["from"])]


def test_a_second_long_request_makes_no_second_transformation(server: Server, before: int) -> None:
    """The paper's figure 13: a long request arrives while a wide instance serves another, and four
    instances are alone. It has the tokens and logprobs of a group of four.
    """
    prompt = tokens(2, 2060)
    with ThreadPoolExecutor(6) as threads:
        first = threads.submit(server.post, tokens(1, 2100), 300)
        wait_until(lambda: server.requests("running") == 1, server.status)
        short = [threads.submit(server.post, tokens(10 + i, 100), 30) for i in range(4)]
        answer = threads.submit(server.post, prompt, 10).result(WAIT_S)
        assert answer.status_code == 200, answer.text
        assert not first.done()
        reasons = joins_since(server, before)
        assert all(one.result(WAIT_S).status_code == 200 for one in (first, *short))
    assert reasons == ["context: a request needs 4 engines"]
    assert joins_since(server, before) == reasons

    choice = answer.json()["choices"][0]
    whole = server.post(prompt, 10, 4).json()["choices"][0]
    assert choice["token_ids"] == whole["token_ids"]
    ours, theirs = (one["logprobs"]["token_logprobs"] for one in (choice, whole))
    assert worst_difference(ours, theirs) <= WORST_LOGPROB


def test_engines_part_after_a_long_request_and_keep_room(server: Server, before: int) -> None:
    """`status` and `switches` say so."""
    assert server.post(tokens(3, 2070), 5).status_code == 200
    wait_until(lambda: server.status()["layout"] == ALONE, server.switches)
    reasons = [one["reason"] for one in server.switches()[before:]]
    assert len(reasons) == 2
    assert reasons[1].startswith("no long request in group [")
    assert server.post(tokens(4, 50), 5).status_code == 200
    kept = server.status()["kept_room"]
    assert len(kept["engines"]) == 4
    assert kept["tokens"] >= 2075


def test_short_requests_make_no_switch(server: Server, before: int) -> None:
    """However many there are."""
    with ThreadPoolExecutor(40) as threads:
        asked = [threads.submit(server.post, tokens(30 + i, 200), 40) for i in range(40)]
        assert all(one.result(WAIT_S).status_code == 200 for one in asked)
    assert len(server.switches()) == before


def requests_of_both_kinds(server: Live) -> list[Asked]:
    """Return each of stock's requests for any engine, for one that is alone and for a group of
    four.
    """
    return [Asked(job, degree) for job in server.jobs() for degree in (None, *DEGREES)]


def test_answers_are_stocks_while_the_policy_changes_the_layout(server: Live, before: int) -> None:
    """A group of four forms for a long request, and parts afterwards."""
    for _ in range(ROUNDS):
        with server.asking(requests_of_both_kinds(server)):
            assert server.post(tokens(5, 2100), 60).status_code == 200
        wait_until(lambda: server.status()["layout"] == ALONE, server.switches)
    assert len(server.switches()) - before >= 2 * ROUNDS
    server.check()


def test_answers_are_stocks_when_an_engine_of_a_group_is_lost(server: Live, before: int) -> None:
    """The long request of the group and the others are answered all the same."""
    with ThreadPoolExecutor(1) as threads, server.asking(requests_of_both_kinds(server)):
        long = threads.submit(server.post, tokens(6, 2100), 200)
        wait_until(lambda: joins_since(server, before), server.status)
        group = next(group for group in server.status()["layout"] if len(group) > 1)
        kill(server, group[-1])
        assert long.result(WAIT_S).status_code == 200
    wait_until(lambda: is_whole(server), server.log, WAIT_S)
    server.answer_all(requests_of_both_kinds(server))
    server.check()
