"""The server's own log of its switches, as `GET /flying/switches` gives it, and the layouts that
follow from it.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec

from flying_lab.bench.client import Target
from flying_lab.errors import BenchError
from flying_lab.results.results import Run

ANSWER_S = 30.0
Groups = tuple[tuple[int, ...], ...]


class LoggedSwitch(
    msgspec.Struct, frozen=True, rename={"time_s": "time", "old": "from", "new": "to"}
):
    """The fields of one switch that reports use; times in ms are as in the server's
    documentation.
    """

    number: int
    time_s: float
    """When the engines were told, in seconds since the epoch by the server's clock; 0 while they
    are not.
    """
    old: Groups
    new: Groups
    reason: str = ""
    mode: str = ""
    requests_in_flight: int = 0
    cutover_ms: float | None = None
    drain_ms: float | None = None
    worst_token_gap_ms: float = 0.0
    problem: str | None = None


class SwitchLog(msgspec.Struct, frozen=True):
    """A server's log, read at the end of a replay."""

    layout: Groups
    """The layout at the end of the replay, when the log was read."""
    devices_per_engine: int
    switches: tuple[LoggedSwitch, ...]

    @property
    def engines(self) -> int:
        """Return the number of engines."""
        return sum(map(len, self.layout))


@dataclass(frozen=True)
class Span:
    """A time with one layout, in seconds since the start of the replay."""

    begin_s: float
    end_s: float
    groups: Groups


def fetch(target: Target) -> dict[str, Any] | None:
    """Return the log of a server, every field as the server has it; None if the server is not one
    of ours.

    Raises:
        BenchError: if it does not answer.
    """
    with httpx.Client(headers=target.headers, timeout=ANSWER_S, trust_env=False) as http:
        try:
            answers = [http.get(f"{target.url}/flying/{name}") for name in ("status", "switches")]
            if any(answer.status_code in (404, 405) for answer in answers):
                return None
            status, log = (answer.raise_for_status().json() for answer in answers)
            kept = {name: status[name] for name in ("layout", "devices_per_engine")}
            return {**kept, "switches": log["switches"]}
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            raise BenchError(
                f"{target.url}/flying/switches: the log of switches cannot be read ({error!r})"
            ) from None


def load(path: Path) -> SwitchLog | None:
    """Read the log beside results; None if there is no such file. Raises BenchError if the file is
    no log.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=SwitchLog)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise BenchError(f"{path}: no log of switches ({error})") from None


def at_s(switch: LoggedSwitch, run: Run) -> float:
    """Return when a switch was ordered, in seconds since the start of the replay."""
    return switch.time_s - run.started_wall_s


def carried_out(log: SwitchLog) -> list[LoggedSwitch]:
    """Return the switches that engines were told of, in the order of time."""
    return sorted(
        (switch for switch in log.switches if switch.time_s), key=lambda switch: switch.time_s
    )


def during(log: SwitchLog, run: Run) -> list[LoggedSwitch]:
    """Return the switches that engines were told of while the replay ran."""
    return [switch for switch in carried_out(log) if 0 <= at_s(switch, run) <= run.duration_s]


def spans(log: SwitchLog, run: Run) -> list[Span]:
    """Return the layouts of a replay, one after the other.

    A layout counts from when the engines were told of it. The server keeps its last 1000 switches.
    The layouts before the first of them are unknown and have no span, unless it is the server's
    very first switch.
    """
    found: list[Span] = []
    made = carried_out(log)
    begin_s, groups = 0.0, made[0].old if made else log.layout
    if made and made[0].number > 1:
        begin_s = max(0.0, at_s(made[0], run))
    for switch in made:
        end_s = min(at_s(switch, run), run.duration_s)
        if end_s > begin_s:
            found.append(Span(begin_s, end_s, groups))
            begin_s = end_s
        groups = switch.new
    if begin_s < run.duration_s:
        found.append(Span(begin_s, run.duration_s, groups))
    return found
