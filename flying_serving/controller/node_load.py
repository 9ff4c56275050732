"""The load of a whole node, for routers: of all its engines, and of requests that no engine has."""

from typing import Any

import msgspec

from flying_serving.controller.state import ClusterState
from flying_serving.layout.groups import Group


class NodeLoad(msgspec.Struct, frozen=True):
    """The load of a node.

    `requests_waiting`: in the task pool, and in groups beyond the requests that a group runs at a
    time (`max_num_seqs`). `kv_tokens_used`: prompt and output tokens that running requests have in
    the KV cache; a prefix that they share counts for each. `kv_tokens_free`: tokens that the groups
    of the layout have room for beside them. `kv_usage`: the share of the KV memory that is used, 0
    to 1.

    `longest_request_tokens`: prompt and output of the longest request that a group of the layout
    holds. `longest_request_tokens_any_layout`: the same for any group that the engines which are
    there can form.
    """

    requests_running: int
    requests_waiting: int
    kv_tokens_used: int
    kv_tokens_free: int
    kv_usage: float
    longest_request_tokens: int
    longest_request_tokens_any_layout: int
    layout: list[list[int]]
    engines: int
    lost_engines: list[int]

    @property
    def requests(self) -> int:
        """Number of all requests under way."""
        return self.requests_running + self.requests_waiting

    def to_json(self) -> dict[str, Any]:
        """Return the answer of `GET /load`. `server_load` is vLLM's name for `requests`, `load` is
        vllm-router's.
        """
        under_way = {"server_load": self.requests, "load": self.requests}
        return under_way | msgspec.structs.asdict(self) | {"degraded": bool(self.lost_engines)}


def node_load(state: ClusterState, max_model_len: int) -> NodeLoad:
    """Return the load at this moment. `max_model_len`: tokens of prompt and output that vLLM allows
    a request.
    """
    layout, loads, rooms = state.layout, state.loads, state.rooms
    most_seqs = state.settings.limits.max_num_seqs
    behind = sum(max(0, len(loads[group].requests) - most_seqs) for group in loads.groups)
    shares = {engine: _share(state, engine) for engine in layout.engines}
    free = sum(
        rooms.tokens(group) * (1 - max(shares[engine] for engine in group))
        for group in layout.groups
    )
    most_tokens = state.settings.capacity.most_tokens
    return NodeLoad(
        requests_running=max(0, state.running - behind),
        requests_waiting=len(state.pool) + behind,
        kv_tokens_used=sum(_held_tokens(state, group) for group in loads.groups),
        kv_tokens_free=int(free),
        kv_usage=sum(shares.values()) / len(shares) if shares else 0.0,
        longest_request_tokens=min(max_model_len, max(map(rooms.tokens, layout.groups), default=0)),
        longest_request_tokens_any_layout=min(
            max_model_len, max((most_tokens[size] for size in state.formable), default=0)
        ),
        layout=layout.to_lists(),
        engines=state.settings.engines,
        lost_engines=sorted(state.absent_engines),
    )


def _held_tokens(state: ClusterState, group: Group) -> int:
    work = state.loads[group]
    return max(0, work.prompt_tokens + work.output_tokens - work.prefill_tokens)


def _share(state: ClusterState, engine: int) -> float:
    """Return the share of an engine's KV memory that requests of all its groups have."""
    groups, room_tokens = state.loads.of_engine(engine), state.rooms.tokens
    return min(1.0, sum(_held_tokens(state, group) / room_tokens(group) for group in groups))
