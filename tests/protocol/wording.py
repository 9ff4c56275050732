"""What happens in the model, in words: the lines of a trace."""

from __future__ import annotations

from collections.abc import Sequence

from flying_serving.engine.tickets import (
    BlocksReserved,
    LendBlocks,
    MigrateKV,
    RecallBlocks,
    ReserveBlocks,
    ReturnBlocks,
    RunStep,
    Ticket,
)
from tests.protocol.seats import Label


def in_words(label: Label, tickets: Sequence[Ticket]) -> str:
    """Return what happened. `tickets`: all of them, by number."""
    match label:
        case ("has", engine, sender, ticket, took):
            return f"engine {engine} has {_name(tickets[ticket])} from {sender}: {took.value}"
        case ("step", group, *numbers):
            return f"{group} together: {'; '.join(_name(tickets[number]) for number in numbers)}"
        case ("hears", engine, message):
            return f"engine {engine} hears {message}"
        case ("abort", name):
            return f"the client aborts {name}"
        case (what, engine):
            return f"engine {engine} {what}"
        case _:
            return " ".join(label)


def _name(ticket: Ticket) -> str:
    match ticket:
        case RunStep():
            plan = ticket.plan
            what = str(dict(plan.num_scheduled_tokens) or f"after the end of {sorted(plan.finished_req_ids)}")
        case MigrateKV():
            what = f"{ticket.moves} from {ticket.source} to {ticket.target}"
        case LendBlocks() | ReturnBlocks():
            what = str(ticket.blocks)
        case ReserveBlocks():
            what = f"{ticket.count}, {ticket.needed} of them at once,"
        case BlocksReserved() | RecallBlocks():
            what = str(ticket.count)
    return f"{type(ticket).__name__} {what} of {ticket.group}"
