"""Settings of all tests: hypothesis does not judge by the clock, since machines are shared; logs are as at first."""

import logging
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("shared machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared machine")


@pytest.fixture(autouse=True)
def log_levels_stay() -> Iterator[None]:
    """vLLM changes its logger's level in some functions that tests call in their own process."""
    logger = logging.getLogger("vllm")
    level = logger.level
    yield
    logger.setLevel(level)
