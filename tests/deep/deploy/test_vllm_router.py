"""Two nodes of two engines each behind vllm-router: balance, prefix caches, sessions; nodes that
die, drain and end.
"""

import asyncio
import random
from collections.abc import Iterator

import httpx
import psutil
import pytest

from harness.nodes import scenarios
from harness.nodes.deployment import Counts, Deployment, NodeAt
from harness.nodes.load import Asked, ask, ask_all, client, completion, fresh, mixed, text
from harness.nodes.scenarios import STREAM_TOKENS, Figures, until
from harness.streams import begin

pytestmark = pytest.mark.server

COUNT, PREFIXES, CLIENTS = 200, 40, 16
HELD, HELD_TOKENS, ROUND, ROUNDS = 14, 1900, 10, 40
"""Streams that keep one node busy, their tokens, and new requests in a round: 1 round in 1,024 is
right by chance.
"""
SEED = 29
MAX_DIFFERENCE, MIN_HITS = 0.5, 0.9
"""Of requests: at most twice as many on one node, as nodes of a busy machine differ in speed
(docs/deployment.md has what was measured); of prefix hits: as a share of those on one node alone.
"""
GONE_S = 60.0
PROMPT_TOKENS = "vllm:prompt_tokens_total"
BODIES = mixed(COUNT, PREFIXES, seed=SEED)
FIRST_LETTERS, REPLY_TOKENS, HELD_REPLY_TOKENS, SESSIONS = 800, 60, 180, 4
"""Of a conversation: the first prompt, an answer, one that goes on while another conversation
begins. As text, which the next prompt has, an answer has up to three times as many tokens.
"""
MOST_CONVERSATIONS = 20
TOGETHER, APART = [[0, 1]], [[0], [1]]


@pytest.fixture(scope="module")
def deployment() -> Iterator[Deployment]:
    with Deployment.of_nodes(2) as live:
        yield live


def tokens(asked: list[Asked]) -> list[list[int]]:
    """Those of each request. All have been answered to their end."""
    assert [one.problem for one in asked if one.problem] == []
    return [one.answer.tokens for one in asked]


Alone = tuple[list[list[int]], float]


@pytest.fixture(scope="module")
def alone(deployment: Deployment) -> Alone:
    """The tokens of each request, and the share of prefix hits, when one node gets all of them."""
    node = deployment.nodes()[0]
    counts = Counts([node])
    asked = asyncio.run(ask_all(node.url, BODIES, clients=CLIENTS, cache_salt="alone"))
    return tokens(asked), counts.hits


def test_cache_aware_balances_nodes_and_keeps_prefixes_together(
    deployment: Deployment, alone: Alone
) -> None:
    expected, hits = alone
    counts = Counts(deployment.nodes())
    asked = asyncio.run(ask_all(deployment.url, BODIES, clients=CLIENTS, cache_salt="cache_aware"))
    assert tokens(asked) == expected
    assert counts.difference <= MAX_DIFFERENCE, counts.requests
    assert counts.hits >= MIN_HITS * hits, (counts.hits, hits)


async def all_go_to(router: Deployment, nodes: list[NodeAt], number: int, seed: int) -> bool:
    """Whether at last a round of new requests goes to one node, while the other has more streams
    than that.

    The router hears each second how many requests a node has, and counts what it sends in between.
    """
    draw = random.Random(seed)
    async with client(nodes[1 - number].url) as direct, client(router.url) as http:
        _, streams = await begin(direct, [fresh(draw, HELD_TOKENS) for _ in range(HELD)])
        try:
            for _ in range(ROUNDS):
                counts = Counts([nodes[number]])
                answers = [await ask(http, fresh(draw, 2)) for _ in range(ROUND)]
                assert [one.problem for one in answers if one.problem] == []
                assert not any(one.done() for one in streams)
                if counts.requests == [ROUND]:
                    return True
        finally:
            for one in streams:
                one.cancel()
            await asyncio.gather(*streams, return_exceptions=True)
    return False


async def test_power_of_two_sends_to_the_node_with_fewer_requests(deployment: Deployment) -> None:
    """The router is started before nodes that run already."""
    nodes = deployment.nodes()
    with Deployment.before(nodes, "--router-policy=power_of_two") as router:
        for number in range(2):
            assert await all_go_to(router, nodes, number, seed=31 + number)


class Conversation:
    """Turns that each begin like the one before, its answer included.

    The first is so long that an answer is the smaller part of the next: the router goes by what it
    has seen, prompts.
    """

    def __init__(self, http: httpx.AsyncClient, nodes: list[NodeAt], seed: int) -> None:
        self._http = http
        self._nodes = nodes
        self._draw = random.Random(seed)
        self._prompt = text(self._draw, FIRST_LETTERS)

    async def begin(self, tokens: int = REPLY_TOKENS) -> int:
        """Begin a turn. Returns the number of the node that has computed its prompt."""
        counts = Counts(self._nodes)
        self._asked = Asked.now()
        body = completion(self._prompt, tokens, seed=self._draw.getrandbits(31))
        self._asking = asyncio.create_task(ask(self._http, body, self._asked))
        await until(lambda: any(counts.of(PROMPT_TOKENS)) or self._asked.problem)
        assert self._asked.problem is None
        (place,) = [number for number, count in enumerate(counts.of(PROMPT_TOKENS)) if count]
        return place

    async def end(self) -> None:
        """Wait for the end of a turn."""
        await self._asking
        assert self._asked.problem is None
        self._prompt += self._asked.answer.text + text(self._draw, 20)


async def change(nodes: list[NodeAt], groups: list[list[int]]) -> None:
    """Change the layout of all nodes; what runs there migrates."""
    for node in nodes:
        await asyncio.to_thread(
            node.ask, "POST", "/flying/layout", {"groups": groups, "mode": "migrate"}
        )


def pulled(nodes: list[NodeAt]) -> float:
    """How many requests have migrated with their KV."""
    return sum(node.counted()["flying:kv_pulled_requests_total"] for node in nodes)


async def one_on_each(http: httpx.AsyncClient, nodes: list[NodeAt]) -> list[Conversation]:
    """Begin conversations until each node has one; the others end.

    The router gives a new text to the node that has fewer of its requests, and the first node if
    both have none. So a request is held until the second node has a conversation, and the next
    ones come to the first node, whether that conversation has ended or not.
    """
    held = asyncio.create_task(ask(http, fresh(random.Random(SEED), HELD_TOKENS)))
    counts = Counts(nodes)
    await until(lambda: any(counts.of(PROMPT_TOKENS)))
    found: dict[int, Conversation] = {}
    for seed in range(MOST_CONVERSATIONS):
        conversation = Conversation(http, nodes, seed)
        place = await conversation.begin(HELD_REPLY_TOKENS)
        held.cancel()
        if place in found:
            await conversation.end()
        else:
            found[place] = conversation
        if len(found) == len(nodes):
            return [found[number] for number in range(len(nodes))]
    pytest.fail(f"{MOST_CONVERSATIONS} conversations are on node {list(found)}")


async def test_a_conversation_stays_on_its_node_by_its_text(deployment: Deployment) -> None:
    """While layouts change there."""
    nodes = deployment.nodes()
    before = pulled(nodes)
    with Deployment.before(nodes, "--router-policy=cache_aware") as router:
        await expect_one_node_for_each(router, nodes)
    assert pulled(nodes) > before


async def expect_one_node_for_each(router: Deployment, nodes: list[NodeAt]) -> None:
    """Of two conversations, one on each node, each turn is on the node of the one before."""
    async with client(router.url) as http:
        first, second = await one_on_each(http, nodes)
        for groups in (TOGETHER, APART, TOGETHER):
            await change(nodes, groups)
            await first.end()
            await second.end()
            assert [await second.begin(), await first.begin()] == [1, 0]
        await change(nodes, APART)
        await first.end()
        await second.end()


async def test_a_session_stays_on_its_node_by_its_header(deployment: Deployment) -> None:
    """While layouts change there. As many sessions as it takes to see that both nodes have some."""
    nodes, seen = deployment.nodes(), list[int]()
    with Deployment.before(nodes, "--router-policy=consistent_hash") as router:
        while len(seen) < SESSIONS or len(set(seen)) == 1:
            number = len(seen)
            async with client(router.url, **{"X-Session-ID": f"session {number}"}) as http:
                for reply, groups in enumerate((TOGETHER, APART)):
                    session = Conversation(http, nodes, 2 * number + reply)
                    place = await session.begin()
                    if reply == 0:
                        seen.append(place)
                    await change(nodes, groups)
                    await session.end()
                    assert place == seen[-1]


def assert_right(deployment: Deployment, figures: Figures) -> None:
    """Streams that have ended have the tokens of the same request alone."""
    bodies = [
        body
        for body, one in zip(figures.bodies, figures.streams, strict=True)
        if one.problem is None
    ]
    alone = asyncio.run(
        ask_all(deployment.nodes()[0].url, bodies, clients=CLIENTS, cache_salt="again")
    )
    assert [one.answer.tokens for one in figures.streams if one.problem is None] == tokens(alone)


def left(parts: list[psutil.Process]) -> list[psutil.Process]:
    """Those that have not ended in time."""
    psutil.wait_procs(parts, GONE_S)
    return [part for part in parts if part.is_running() and part.status() != psutil.STATUS_ZOMBIE]


def test_drained_node_loses_no_request_and_is_used_again(deployment: Deployment) -> None:
    figures = asyncio.run(scenarios.drained(deployment, 0, seed=1))
    assert 0 < figures.on_node < len(figures.streams)
    assert figures.broken == []
    assert figures.refused == []
    assert figures.after_drain == 0
    assert_right(deployment, figures)


def test_a_killed_node_takes_only_its_streams_and_comes_back(deployment: Deployment) -> None:
    """Nothing is left of it; new requests do not fail, and are answered while it is gone."""
    before = deployment.nodes()[1]
    parts = [before.process, *before.process.children(recursive=True)]
    figures = asyncio.run(scenarios.killed(deployment, 1, seed=2))
    assert 0 < figures.on_node < len(figures.streams)
    assert len(figures.broken) == figures.on_node
    assert figures.refused == []
    assert figures.served_meanwhile > 0
    assert deployment.nodes()[1].url == before.url
    assert left(parts) == []
    assert_right(deployment, figures)


async def test_streams_end_when_the_deployment_is_told_to(deployment: Deployment) -> None:
    """Within --shutdown-timeout; then nothing is left."""
    parts = psutil.Process(deployment.process.pid).children(recursive=True)
    draw, asked = random.Random(3), [Asked.now() for _ in range(4)]
    async with client(deployment.url) as http:
        asking = [
            asyncio.create_task(ask(http, fresh(draw, STREAM_TOKENS), into)) for into in asked
        ]
        await until(lambda: all(into.answer.tokens for into in asked))
        deployment.process.terminate()
        await asyncio.gather(*asking)
    assert [len(found) for found in tokens(asked)] == [STREAM_TOKENS] * len(asked)
    assert await asyncio.to_thread(deployment.process.wait, GONE_S) == 0
    assert await asyncio.to_thread(left, parts) == []
