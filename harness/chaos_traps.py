"""Traps in a server's engines: one ends or freezes at the very moment that is named, for
`benchmarks/chaos.py`.

`PREAMBLE` installs them before the server forks engines. Then a `Trap` may be laid in a folder that
both sides know: the engine that comes to its phase removes it and sends the signal. What happens is
noted there, with times of CLOCK_MONOTONIC.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import wraps
from pathlib import Path
from typing import Any

TRAP, EVENTS = "trap", "events"
SENT_S = 0.005
"""How long an answer that was given may need until it is sent."""
PREAMBLE = """
from harness.chaos_traps import Traps
Traps({folder!r}).install()
"""


@dataclass(frozen=True)
class Trap:
    """The engine `victim` gets `signal` when it comes to `phase` for the time after `skip` times.

    `of_owner`: the victim, with `pid`, is not the engine that comes to the phase. In one of KV that
    is pulled it is an engine from which that is pulled; it is any when the phase is that an engine
    starts again.
    """

    phase: str
    victim: int
    signal: int
    skip: int = 0
    of_owner: bool = False
    pid: int = 0

    def lay(self, folder: Path) -> None:
        """Lay it; it replaces one that is there."""
        whole = folder / "new"
        whole.write_text(json.dumps(asdict(self)))
        whole.rename(folder / TRAP)


class Traps:
    """The server's side: every engine's process has these, from the one that it was forked from."""

    def __init__(self, folder: str) -> None:
        self._trap = Path(folder, TRAP)
        self._events = Path(folder, EVENTS)
        self._engine: int | None = None
        self._passed: dict[Trap, int] = {}
        self._answered = False

    def laid(self, phase: str) -> Trap | None:
        """The trap of this phase, if there is one."""
        with suppress(FileNotFoundError):
            trap = Trap(**json.loads(self._trap.read_text()))
            return trap if trap.phase == phase else None
        return None

    def note(self, what: str, **more: Any) -> None:
        """Append an event to what the benchmark reads."""
        with self._events.open("a") as events:
            events.write(json.dumps({"what": what, "s": time.monotonic(), **more}) + "\n")

    def spring_at(self, phase: str, owners: tuple[int, ...] = ()) -> None:
        """This engine is at a phase, maybe with KV of the engines `owners`: spring the trap for it,
        if there is one.
        """
        trap = self.laid(phase)
        if trap is None or (
            trap.victim not in owners if trap.of_owner else trap.victim != self._engine
        ):
            return
        passed = self._passed.get(trap, 0)
        self._passed[trap] = passed + 1
        if passed < trap.skip:
            return
        with suppress(FileNotFoundError):
            self._trap.unlink()
            self.note("sprung", engine=trap.victim)
            os.kill(trap.pid if trap.of_owner else os.getpid(), trap.signal)

    def install(self) -> None:
        """Wrap what engines do in each phase, and what the server does when it loses one."""
        from flying_serving.comm.pulse import Pulse
        from flying_serving.engine import core

        def begins(_: Any, engine: int, device: int | None = None) -> None:
            self._engine = engine

        _wrap(Pulse, "beat", before=begins)
        _wrap(core, "build", before=self._starts)
        self._install_steps()
        self._install_blocks()
        self._install_orders()
        self._install_pulls()
        self._install_server()

    def _starts(self, built: Any) -> None:
        from flying_serving.config import deployment_of

        engines = deployment_of(built.vllm_config.additional_config).engines
        self.spring_at("starting again", tuple(range(engines)))

    def _install_steps(self) -> None:
        from flying_serving.comm.shm import ShmGroup
        from flying_serving.engine.loop import EngineLoop
        from flying_serving.worker.worker import FlyingCPUWorker

        def step(plan: Any) -> None:
            counts = plan.num_scheduled_tokens.values()
            if counts:
                self.spring_at("prefill" if max(counts) > 1 else "decode")

        _wrap(EngineLoop, "_step_group", before=lambda _, size, message: step(message.plan))
        _wrap(FlyingCPUWorker, "execute_model", before=lambda _, plan, *more: step(plan))
        _wrap(ShmGroup, "_run", before=lambda *_: self.spring_at("collective"))

    def _install_blocks(self) -> None:
        from flying_serving.engine.group import Leader, Member
        from flying_serving.memory.lent_blocks import LentBlocks

        def asked(leader: Any, *_: Any) -> None:
            if leader._answers == {}:
                self.spring_at("blocks asked")

        def answered(leader: Any, *_: Any) -> None:
            if leader._answers is None:
                self.spring_at("blocks lent")

        def recalled(member: Any, count: int, now_s: float) -> None:
            if member._recalled_at_s == now_s:
                self.spring_at("reclaim")

        _wrap(Leader, "_ask", after=asked)
        _wrap(
            Member,
            "reserve",
            lambda *_: self.spring_at("blocks asked"),
            lambda *_: self.spring_at("blocks reserved"),
        )
        _wrap(Leader, "take_answer", after=answered)
        _wrap(
            LentBlocks,
            "commit",
            before=lambda _, blocks: self.spring_at("blocks lent") if blocks else None,
        )
        _wrap(LentBlocks, "take_back", before=lambda *_: self.spring_at("release"))
        _wrap(Member, "recall", after=recalled)
        _wrap(Leader, "give_back", before=lambda *_: self.spring_at("reclaim"))

    def _install_orders(self) -> None:
        from flying_serving.engine.loop import EngineLoop
        from flying_serving.engine.utilities import EngineUtilities

        def answered(*_: Any) -> None:
            self._answered = True

        def goes_on(_: Any) -> None:
            if self._answered:
                self._answered = False
                if self.laid("order acknowledged"):
                    time.sleep(SENT_S)
                    self.spring_at("order acknowledged")

        _wrap(EngineUtilities, "flying_switch", lambda *_: self.spring_at("order sent"), answered)
        _wrap(EngineLoop, "_advance_migrations", before=goes_on)

    def _install_pulls(self) -> None:
        from flying_serving.migration.chunks import Chunks
        from flying_serving.migration.incoming_requests import IncomingRequests
        from flying_serving.migration.migrations import Migrations
        from flying_serving.migration.source import Source
        from flying_serving.migration.target import Target

        def begins(target: Any, arrival: Any, *_: Any) -> None:
            self.spring_at("pull open", arrival.source.group)

        def pulled(target: Any, arrival: Any) -> None:
            if not arrival.has_ended and arrival.pulled_tokens > arrival.cached_tokens:
                self.spring_at("pull half", arrival.source.group)

        def admitted(incoming: Any, arrival: Any, tokens: int) -> None:
            if tokens > arrival.cached_tokens:
                self.spring_at("pull sealed", arrival.source.group)
                self.spring_at("split after", arrival.source.group)

        def pulls(_: Any, message: Any) -> None:
            if len(message.group) > 1 and message.group[0] != self._engine:
                self.spring_at("pull open")
                self.spring_at("split before")
                if message.tokens.start:
                    self.spring_at("pull half")

        def has_pulled(_: Any, message: Any) -> None:
            if len(message.group) > 1 and message.group[0] != self._engine:
                self.spring_at("pull sealed")
                self.spring_at("split after")

        def published(source: Any) -> None:
            if any(one.early for one in source.running.values()):
                self.spring_at("split before")

        _wrap(Target, "_begin_pull", before=begins)
        _wrap(Target, "_end_pull", after=pulled)
        _wrap(IncomingRequests, "admit", before=admitted)
        _wrap(Migrations, "pull_part", pulls, has_pulled)
        _wrap(Source, "publish", after=published)
        in_time = Chunks.in_time

        def in_small_chunks(
            chunks: Any, arrival: Any, stop: int, limit_s: float | None
        ) -> tuple[int, float]:
            if self.laid("pull half"):
                stop = min(
                    stop, arrival.pulled_tokens + chunks._pools[arrival.size].scheduler.block_size
                )
            return in_time(chunks, arrival, stop, limit_s)

        Chunks.in_time = in_small_chunks  # type: ignore[method-assign]

    def _install_server(self) -> None:
        """What the server notices; and it starts each engine again at once, however often that was
        lost.
        """
        from flying_serving.controller.controller import Controller
        from flying_serving.controller.fault_recovery import FaultRecovery
        from flying_serving.server.engines import supervisor

        supervisor.STABLE_S = 0.0
        _wrap(
            supervisor.EngineSupervisor,
            "_ended",
            before=lambda _, engine, sentinel: self.note("lost", engine=engine),
        )
        _wrap(
            FaultRecovery,
            "_requeue_or_fail",
            before=lambda _, request, now_s: self.note("orphaned", request=request.request_id),
        )
        _wrap(Controller, "engines_lost", before=self._between_groups)
        _wrap(
            Controller,
            "engine_back",
            before=lambda _, engine, now_s: self.note("back", engine=engine),
        )

    def _between_groups(self, controller: Any, engines: Any, now_s: float, *, killed: bool) -> None:
        """Note streams that migrate when engines are lost, or that those have a part of."""
        for state in [*controller.state.pool, *controller.state.started.values()]:
            split = controller.state.splits.open.get(state.request_id)
            partners = () if split is None else (*split.kv.group, *split.second)
            sources = () if state.kv is None else state.kv.group
            waits = state.output_tokens and state.request_id in controller.state.pool
            if waits or not set(engines).isdisjoint((*partners, *sources)):
                self.note("between", request=state.request_id)


def _wrap(
    owner: Any,
    name: str,
    before: Callable[..., Any] | None = None,
    after: Callable[..., Any] | None = None,
) -> None:
    """Call `before` and `after` around a function, with its arguments."""
    original = getattr(owner, name)

    @wraps(original)
    def wrapped(*args: Any, **options: Any) -> Any:
        if before is not None:
            before(*args, **options)
        result = original(*args, **options)
        if after is not None:
            after(*args, **options)
        return result

    setattr(owner, name, wrapped)
