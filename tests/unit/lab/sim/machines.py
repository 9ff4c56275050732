"""Machines as the simulator has them: of the cost model, and of a file of measurements."""

from __future__ import annotations

from pathlib import Path

from flying_lab.sim import hardware, models
from flying_lab.sim.machine import Measured, Modelled
from flying_serving.predict.migrations import MigrationCost
from flying_serving.predict.steps import StepCost


def h200(model: str = "llama-3-8b", devices: str = "h200x4") -> Modelled:
    """A machine of the cost model."""
    return Modelled(models.load(model), hardware.parse_devices(devices))


def machine_file(path: Path, migrations: dict[int, MigrationCost] | None = None) -> Path:
    """What `flying-serving fit` writes."""
    cost = {
        size: StepCost(0.02 / size, prefill_token_s=1e-4, sequence_s=1e-3, context_token_s=0.0)
        for size in (1, 2)
    }
    measured = Measured(
        source="a test",
        engines=2,
        devices_per_engine=1,
        blocks=400,
        block_tokens={1: 16, 2: 32},
        step_cost=cost,
        migration_cost=migrations or {},
    )
    path.write_text(measured.model_dump_json(), encoding="utf-8")
    return path
