"""What a controller holds does not grow with the requests, switches and losses that are over."""

import random

import pytest

from flying_serving.config import MODES
from flying_serving.controller import switches
from flying_serving.controller.requests import RequestSpec
from flying_serving.layout.groups import Layout
from flying_serving.predict.migrations import MigrationCost
from harness.entries import entries
from tests.unit.controller.model_settings import settings
from tests.unit.controller.mortal import MortalShell

EPISODES, KEPT = 60, 10
"""Of each half of a test; records of switches that a controller keeps."""


class Load:
    """Random requests, orders of a layout and losses; all that was begun has ended after `run`."""

    def __init__(self, policy: str) -> None:
        self.shell = MortalShell(settings(policy))
        self.shell.controller.state.migrates = dict.fromkeys((2, 4), MigrationCost(5e-4, 1e-6))
        self._draw = random.Random(28)
        self._layouts = Layout.all(4, [1, 2, 4])
        self.requests = 0

    def run(self, episodes: int) -> None:
        """Requests come, the layout changes, an engine is lost and comes back, again and again."""
        for _ in range(episodes):
            self._arrivals()
            self._go_on(2)
            if not self.shell.controller.changeover.is_under_way:
                self.shell.order(self._draw.choice(self._layouts), self._draw.choice(MODES))
            self._go_on(2)
            engine = self._draw.randrange(4)
            self.shell.lose(engine, killed=self._draw.random() < 0.5)
            self._go_on(2)
            self.shell.revive(engine)
            if self.shell.open:
                self.shell.finish(self._draw.choice(sorted(self.shell.open)), aborted=True)
        self.shell.settle(3000)

    def _arrivals(self) -> None:
        draw = self._draw
        for _ in range(6):
            self.requests += 1
            prompt, outputs = draw.randrange(1, 60), draw.randrange(1, 40)
            degree = draw.choice([None, None, None, 1, 2])
            deadline_s = draw.choice([None, None, 5.0])
            asked = outputs, degree, draw.choice([0, -1]), deadline_s, draw.random() < 0.8
            self.shell.arrive(f"r{self.requests}", RequestSpec(prompt, prompt + outputs, *asked))

    def _go_on(self, rounds: int) -> None:
        shell = self.shell
        for _ in range(rounds):
            if shell.ordered is not None:
                shell.acknowledge()
            for request_id in shell.running():
                if request_id in shell.open and shell.open[request_id].group is not None:
                    shell.token(request_id, self._draw.randrange(1, 20))
            shell.tick(0.3)


def held(load: Load) -> int:
    """Return the entries of a controller, without records of switches: these are KEPT at most, and
    those of switches for load hold more.
    """
    kept = load.shell.controller.state.switches.kept
    records = list(kept)
    assert len(records) <= KEPT
    kept.clear()
    found = entries(load.shell.controller)
    kept.extend(records)
    return found


@pytest.mark.parametrize("policy", ["manual", "auto"])
def test_a_controller_holds_no_more_after_twice_as_much(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(switches, "KEPT", KEPT)
    load = Load(policy)
    load.run(EPISODES)
    before, switched = held(load), len(load.shell.switches)
    assert load.requests > 300 and switched > 3 * KEPT and load.shell.failed
    load.run(EPISODES)
    assert len(load.shell.switches) > 2 * (switched - KEPT)
    assert held(load) < 1.05 * before
