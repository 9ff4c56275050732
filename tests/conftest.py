"""Settings of all tests: hypothesis does not judge by the clock, since machines are shared; logs
are as at first.

And the servers that several modules share. Their tests leave them idle, and change the layout as
they need it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from harness.live import Server

pytest_plugins = ["harness.not_run"]

MAX_PAUSE_S = 0.3
SMALL_BLOCKS = 33

settings.register_profile(
    "shared machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("shared machine")


ROOT_LEVEL = logging.getLogger().level


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


@pytest.fixture(scope="session")
def two_engines() -> Iterator[tuple[Server, str]]:
    """Two engines with vLLM's dev mode and an API key, and the first scrape of their metrics."""
    from harness.live import CLIENTS_MAY_SET_ALL, KEY, Server

    name = "a-tiny-llama"
    flags = (
        f"--served-model-name={name}",
        f"--max-pause-ms={MAX_PAUSE_S * 1000:g}",
        "--enable-prompt-tokens-details",
        CLIENTS_MAY_SET_ALL,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_SERVER_DEV_MODE", "1")
        live = Server("llama", 2, *flags, key=KEY)
    with live:
        live.model = name
        yield live, live.http.get("/metrics").raise_for_status().text


@pytest.fixture(scope="session")
def small_engines() -> Iterator[Server]:
    """Four engines with 32 blocks of 32 tokens each beside vLLM's null block: 1,024 tokens,
    together 4,096.
    """
    from harness.live import BLOCK_BYTES, CLIENTS_MAY_SET_ALL, KEY, Server

    flags = (
        "--max-model-len=4096",
        "--max-num-batched-tokens=256",
        f"--kv-cache-memory-bytes={SMALL_BLOCKS * BLOCK_BYTES}",
        "--lend-blocks=4",
        "--enable-prompt-tokens-details",
        "--enable-prompt-embeds",
        "--enable-scale-out",
        CLIENTS_MAY_SET_ALL,
    )
    with Server("llama", 4, *flags, key=KEY) as live:
        yield live
