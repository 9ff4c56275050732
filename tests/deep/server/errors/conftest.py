"""The server that is used wrongly."""

import pytest

from harness.live import Server


@pytest.fixture(scope="module")
def server(small_engines: Server) -> Server:
    return small_engines
