"""The load of a node as plain JSON, what `GET /load` says and `/flying/status` as well, and whether it takes more."""

from typing import Any

from flying_serving.controller.node_load import node_load
from flying_serving.server.shell import Shell


def load_of(shell: Shell) -> dict[str, Any]:
    """How busy the node is, and whether it drains."""
    found = node_load(shell.controller, shell.model_config.max_model_len)
    return found.to_json() | shell.draining.to_json(found.requests)


def takes_requests(shell: Shell) -> bool:
    """Whether a request that comes now is not refused because the server is to end."""
    return not (shell.draining or shell.calls.ending or shell.calls.channel.engines_dead)
