"""The mock server, one for all tests that only read."""

from collections.abc import Iterator

import pytest

from harness.mock_server import running


@pytest.fixture(scope="session")
def mock_url() -> Iterator[str]:
    """Return the URL of a mock server that sends its tokens at once."""
    with running() as url:
        yield url
