"""Every metric of ours that `/metrics` shows: `table.json`, the one list that code, documentation
and tests share.

Names and labels follow Prometheus' rules (base units, `_total` for counters) and vLLM's (a prefix
with a colon, `model_name` and `engine`).
"""

from importlib.resources import files
from typing import Literal

import msgspec

STEP_BOUNDS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
CUTOVER_BOUNDS_S = (*STEP_BOUNDS_S, 10.0)
DRAIN_BOUNDS_S = (0.01, 0.05, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0)
BACK_BOUNDS_S = (0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0)
GAP_BOUNDS_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0)

LANE_STATES = ("present", "woven", "paused")


class Family(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One metric.

    `name`: as `/metrics` shows it; of a histogram without `_bucket`, `_sum`, `_count`. `labels`:
    beside `model_name`, which all metrics have. `unit`: of its values. `meaning`: one sentence or
    two. `figure`: the field of `wire.EngineFigures` that has its values by group size, if one has.
    """

    name: str
    kind: Literal["gauge", "counter", "histogram"]
    labels: tuple[str, ...]
    unit: str
    meaning: str
    figure: str = ""


TABLE = msgspec.json.decode(
    (files(__package__) / "table.json").read_bytes(), type=tuple[Family, ...]
)
