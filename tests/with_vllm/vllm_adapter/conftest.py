"""What tests of vLLM's schedulers are tried with."""

import pytest


@pytest.fixture(params=[False, True], ids=["one step", "two steps under way"])
def overlaps(request: pytest.FixtureRequest) -> bool:
    """Synchronous and asynchronous scheduling."""
    found: bool = request.param
    return found
