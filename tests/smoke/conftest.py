"""The two servers of the suite. Each test begins with engines that stand alone, and leaves nothing
behind.
"""

from collections.abc import Iterator

import pytest

from flying_serving.layout.groups import Layout
from harness.live import CLIENTS_MAY_SET_ALL, KEY, Server

FLAGS = (CLIENTS_MAY_SET_ALL, "--max-waiting-requests=8")


@pytest.fixture(scope="session")
def servers() -> Iterator[dict[int, Server]]:
    """The servers by their number of engines. Both start at the same time."""
    started = {engines: Server("llama", engines, *FLAGS, key=KEY) for engines in (2, 4)}
    with started[2], started[4]:
        yield started


@pytest.fixture
def two(servers: dict[int, Server]) -> Server:
    """The server of two engines."""
    return servers[2]


@pytest.fixture
def four(servers: dict[int, Server]) -> Server:
    """The server of four engines."""
    return servers[4]


@pytest.fixture(autouse=True)
def at_rest(servers: dict[int, Server]) -> Iterator[None]:
    """Engines stand alone before a test; after it nothing runs, and blocks of KV add up."""
    for engines, server in servers.items():
        server.layout(Layout.uniform(engines, 1).to_lists())
    yield
    for server in servers.values():
        server.until_idle()
        server.check()
