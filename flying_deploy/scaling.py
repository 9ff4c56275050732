"""The number of nodes that the load needs: a policy of Ray Serve's autoscaler."""

from typing import Any

LOAD = "load"
"""The metric of each replica: requests that run or wait in its node."""


def by_load(context: Any) -> tuple[float, dict[str, Any]]:
    """Return the nodes for all requests that run or wait, also in Ray's own queue. Ray rounds up,
    bounds and delays the number.

    `context`: an `AutoscalingContext` of Ray Serve, whose config has the requests per node as
    `target_ongoing_requests`. While a node has not reported its load, or not lately, there are not
    fewer than now.
    """
    told = context.aggregated_metrics.get(LOAD, {})
    loads = [told[replica] for replica in context.running_replicas if replica in told]
    fewest = context.target_num_replicas if len(loads) < len(context.running_replicas) else 0
    requests = sum(loads) + context.total_queued_requests
    return max(fewest, requests / context.config.target_ongoing_requests), {}
