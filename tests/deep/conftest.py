"""The servers that several modules share.

Their tests leave them idle, and change the layout as they need it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from harness.live import Server

MAX_PAUSE_S = 0.3
SMALL_BLOCKS = 33


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
