"""Settings of all tests: hypothesis does not judge by the clock, since machines are shared; logs
are as at first.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, settings

from harness.examples import examples

pytest_plugins = ["harness.not_run", "harness.time_box", "harness.unit_time"]

settings.register_profile(
    "shared machine",
    deadline=None,
    max_examples=examples(100),
    # of few examples a share that is left out says nothing
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
settings.load_profile("shared machine")


ROOT_LEVEL = logging.getLogger().level


@pytest.fixture(autouse=True)
def variables_stay() -> Iterator[None]:
    """A variable that a test or the code that it calls sets is none of the next test's servers."""
    with patch.dict(os.environ):
        yield


@pytest.fixture(autouse=True)
def log_levels_stay() -> Iterator[None]:
    """vLLM changes its logger's level in some functions that tests call in their own process, its
    app the root's.
    """
    logging.getLogger().setLevel(ROOT_LEVEL)
    logger = logging.getLogger("vllm")
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.fixture
def unpatched() -> Iterator[None]:
    """Leave vLLM as it is before and after a test."""
    from flying_serving.vllm_adapter.patches import installer

    installer.uninstall()
    yield
    installer.uninstall()


@pytest.fixture(scope="session")
def classes_imported_here() -> Iterator[None]:
    """vLLM asks here what it wants to know of a model's class, and not in a new interpreter, which
    takes 7 s.
    """
    from vllm.model_executor.models import registry

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_run_in_subprocess", lambda work: work())
        yield
