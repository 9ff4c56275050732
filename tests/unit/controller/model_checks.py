"""What a shell without engines holds the controller's commands and books against."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flying_serving.controller.commands import Dispatch
from flying_serving.layout.groups import Group, aligned_group

if TYPE_CHECKING:
    from tests.unit.controller.model_shell import ModelShell


def check_dispatch(shell: ModelShell, command: Dispatch, holds: int) -> None:
    """The request may go to the group now, which holds `holds` tokens for it."""
    stream, group = shell.open[command.request_id], command.group
    spec = stream.spec
    assert stream.group is None, "dispatched twice"
    assert not shell.holds, "dispatched while a sequential switch waits"

    assert group == aligned_group(group[0], len(group))
    goes_on_there = command.migrated_from is not None and command.migrated_from.group == group
    assert (
        group in shell.layout.groups
        or spec.degree == len(group)
        or goes_on_there
        or shell.is_apart(command)
    )
    assert spec.degree in (None, len(group))
    assert goes_on_there or not _keeps_narrow_waiting(shell, command.request_id, group)

    assert spec.needed_tokens <= holds
    assert command.output_tokens == stream.tokens
    most = holds - spec.prompt_tokens
    assert stream.tokens < command.limit_tokens <= most, "no room for a further token"
    assert command.publishes or command.limit_tokens == most

    assert command.migrated_from == stream.kv
    assert (command.offer is not None) == (_offers_kv(shell, command, holds) or command.publishes)


def _offers_kv(shell: ModelShell, command: Dispatch, holds: int) -> bool:
    """Return whether the request is to go on elsewhere, with its KV, when the group is full."""
    spec, chosen = shell.open[command.request_id].spec, shell.controller.settings
    widest = max(chosen.capacity.kv_tokens)
    is_narrower = len(command.group) < widest or holds < chosen.capacity.lent_tokens
    ends_here = spec.max_output_tokens > command.limit_tokens and is_narrower
    goes_on = spec.can_migrate and spec.degree is None and not chosen.loses_groups
    return ends_here and goes_on and bool(shell.controller.state.migrates)


def _keeps_narrow_waiting(shell: ModelShell, request_id: str, group: Group) -> bool:
    """Return whether engines of a narrower group have to become idle for a request that waits.

    That request goes before this one.
    """
    capacity = shell.controller.settings.capacity
    widest = [
        outer
        for outer in shell.layout.groups
        if len(outer) == max(capacity.kv_tokens) and group[0] in outer
    ]
    if group in widest or not widest or not capacity.lent_tokens:
        return False
    names, priority = list(shell.open), shell.open[request_id].spec.priority
    before = (shell.open[name] for name in names[: names.index(request_id)])
    return any(
        stream.group is None
        and stream.spec.priority <= priority
        and stream.needed_tokens > capacity.kv_tokens[len(widest[0])]
        for stream in before
    )


def check_requests(shell: ModelShell) -> None:
    """The controller knows of the same requests, in the same places, with the same tokens."""
    state = shell.controller.state
    assert sorted(shell.waiting()) == sorted(waiting.request_id for waiting in state.pool)
    assert state.running == len(shell.running())
    for request_id, stream in shell.open.items():
        assert state.group_of(request_id) == stream.group
        if stream.group is not None:
            booked = state.loads[stream.group].requests[request_id]
            assert booked.output_tokens == stream.tokens
            assert booked.prefill_tokens == stream.ahead


def check_books(shell: ModelShell) -> None:
    """Each request, and each part of a split one, is booked where the shell has it."""
    state = shell.controller.state
    state.check_integrity()
    booked = {
        (request_id, group)
        for group in state.loads.groups
        for request_id in state.loads[group].requests
    }
    expected = {
        (name, stream.group) for name, stream in shell.open.items() if stream.group is not None
    }
    expected |= {(f"{part.request_id} (part)", part.group) for part in shell.parts.values()}
    assert booked == expected
    assert len(state.splits) == len(shell.parts)
    assert all(part.request_id in shell.open for part in shell.parts.values())
