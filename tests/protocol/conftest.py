"""Time stands still in the model: where it passes, what engines remember moves into the past."""

import pytest

from flying_serving.engine import core, orders
from tests.protocol.doubles import Clock


@pytest.fixture(autouse=True)
def stopped_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let engines read the model's clock."""
    for module in (core, orders):
        monkeypatch.setattr(module, "time", Clock)
