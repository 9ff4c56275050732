"""Two engines, which every test begins with alone and leaves idle."""

from collections.abc import AsyncIterator, Iterator

import httpx
import pytest

from harness.live import KEEP_ALIVE, KEY, Server
from tests.deep.server.behaviour.comparisons import ALONE


@pytest.fixture(scope="module")
def server(two_engines: tuple[Server, str]) -> Server:
    return two_engines[0]


@pytest.fixture(autouse=True)
def at_rest(server: Server) -> Iterator[None]:
    """Each test begins with two engines alone, and leaves nothing behind."""
    server.layout(ALONE)
    yield
    server.until_idle()
    server.check()


@pytest.fixture
async def http(server: Server) -> AsyncIterator[httpx.AsyncClient]:
    headers = {"Authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(
        base_url=server.url, headers=headers, timeout=120, limits=KEEP_ALIVE
    ) as client:
        yield client
