"""What happens in the model, in words: the lines of a trace."""

from __future__ import annotations

from collections.abc import Sequence

from flying_serving.engine.messages import (
    BeginAnew,
    BlocksReserved,
    LendBlocks,
    Message,
    ReclaimBlocks,
    ReserveBlocks,
    ReturnBlocks,
    RunStep,
)
from flying_serving.migration.messages import KVPulled, PullKV, ReleaseKV
from tests.with_vllm.protocol.events import Label


def describe(label: Label, messages: Sequence[Message]) -> str:
    """Return what happened. `messages`: all of them, by number."""
    match label:
        case ("has", engine, sender, message, took):
            return f"engine {engine} has {_name(messages[message])} from {sender}: {took.value}"
        case ("step", group, *numbers):
            return f"{group} together: {'; '.join(_name(messages[number]) for number in numbers)}"
        case ("step apart", group, engine, number):
            what = f"{group} together: {_name(messages[number])}"
            return f"{what}; engine {engine} samples other tokens"
        case ("hears", engine, client_message):
            return f"engine {engine} hears {client_message}"
        case ("abort", name):
            return f"the client aborts {name}"
        case (what, engine):
            return f"engine {engine} {what}"
        case _:
            return " ".join(label)


def _name(message: Message) -> str:
    match message:
        case RunStep():
            plan = message.plan
            what = str(
                dict(plan.num_scheduled_tokens)
                or f"after the end of {sorted(plan.finished_req_ids)}"
            )
        case PullKV():
            what = f"{message.request_id}, tokens {message.tokens} of {message.source}"
        case KVPulled():
            what = message.request_id
        case ReleaseKV():
            what = str(message.number)
        case BeginAnew():
            what = str(message.times)
        case LendBlocks() | ReturnBlocks():
            what = str(message.blocks)
        case ReserveBlocks():
            what = f"{message.count}, {message.needed} of them at once,"
        case BlocksReserved() | ReclaimBlocks():
            what = str(message.count)
    return f"{type(message).__name__} {what} of {message.group}"
