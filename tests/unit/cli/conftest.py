"""What a server says to the live view."""

from typing import Any

import pytest

from tests.unit.server.figures.states import look, switched


@pytest.fixture
def shown() -> dict[str, Any]:
    """The answer of `GET /flying/view`, some seconds after a switch."""
    return look(*switched("hard"), 9.0)
