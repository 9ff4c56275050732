"""The policy by which Ray Serve scales nodes by their load.

`make test-ray` runs this, as Ray is not in the environment of the other tests.
"""

import inspect
from collections.abc import Sequence

import pytest
from ray.serve.config import AutoscalingConfig, AutoscalingContext

from flying_deploy.scaling import LOAD, by_load


def context(loads: Sequence[float], queued: float, per_node: float) -> AutoscalingContext:
    """What Ray tells a policy of nodes with these loads, of which the last has not told it yet."""
    config = AutoscalingConfig(min_replicas=1, max_replicas=9, target_ongoing_requests=per_node)
    given = dict.fromkeys(inspect.signature(AutoscalingContext).parameters)
    given |= {
        "running_replicas": [*range(len(loads) + 1)],
        "aggregated_metrics": {LOAD: dict(enumerate(loads))},
    }
    return AutoscalingContext(
        **given | {"total_queued_requests": queued, "config": config, "target_num_replicas": 5}
    )


@pytest.mark.parametrize(
    ("loads", "queued", "per_node", "nodes"),
    [((6, 10), 4, 8, 5), ((30, 10), 4, 8, 5.5), ((), 100, 8, 12.5), ((3,), 0, 0.5, 6)],
)
def test_as_many_nodes_as_the_load_asks_for(
    loads: Sequence[float], queued: float, per_node: float, nodes: float
) -> None:
    """Not fewer than there are, while a node has not told its load."""
    assert by_load(context(loads, queued, per_node)) == (nodes, {})


def test_nodes_that_have_all_told_their_load_may_be_fewer() -> None:
    told = context((6, 10), 4, 8)
    told.running_replicas.pop()
    assert by_load(told) == (2.5, {})
