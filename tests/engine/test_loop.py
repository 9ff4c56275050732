"""EngineLoop: what it does beside steps and messages, which the protocol's exploration covers."""

from typing import Any

import pytest

from tests.protocol.client import Job, Retain
from tests.protocol.engine import Engine, Settings


def test_a_reset_of_running_requests_releases_retained_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM raises if a block is in use then, and a pause would never be over."""
    engine = Engine(0, Settings(blocks=6))
    engine.hear(Job("a", 1, 0, prompt=3, tokens=4))
    engine.step_own()
    engine.hear(Retain("a"))
    pool = engine.loop.lanes.own
    assert list(engine.loop.migrations.source.retained) == ["a"]
    in_use: list[int] = []

    def reset(**options: Any) -> bool:
        in_use.append(pool.total - pool.free_count())
        return True

    for scheduler in engine.schedulers.values():
        monkeypatch.setattr(scheduler, "reset_prefix_cache", reset, raising=False)
    options = {"reset_running_requests": False, "reset_connector": False}
    assert engine.loop.reset_prefix_caches(**options)
    assert engine.loop.reset_prefix_caches(**(options | {"reset_running_requests": True}))
    assert in_use == [1, 1, 1, 0, 0, 0]
    assert engine.loop.migrations.source.retained == {}
