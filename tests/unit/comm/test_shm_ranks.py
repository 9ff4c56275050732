"""ShmGroup: no wait outlives its reason; a rank that is missing, killed or interrupted ends it."""

import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from flying_serving.comm import shm, shm_kernels
from flying_serving.comm.shm import ShmGroup
from flying_serving.comm.shm_ranks import FLAG, word
from flying_serving.errors import CollectiveTimeout, EngineLost
from tests.unit.comm.shm_groups import DEADLINE_S, START_S, results, start


def wait_in_barrier(group: ShmGroup, rank: int, world: int) -> tuple[float, str, str]:
    """All-reduce once, then wait in a barrier; return when that failed, with what class and
    message.
    """
    group.all_reduce(torch.ones(3))
    try:
        group.barrier()
    except EngineLost as error:
        return time.monotonic(), type(error).__name__, str(error)
    raise AssertionError("the barrier ended")


def stay_out(group: ShmGroup, rank: int, world: int) -> None:
    """Do not come to the barrier, until the group is aborted."""
    group.all_reduce(torch.ones(3))
    while not group._ranks.words[0]:
        time.sleep(0.01)


def arrive_overdue(group: ShmGroup, rank: int, world: int) -> tuple[float, str, str]:
    """Do as `wait_in_barrier`, but the last rank comes to the barrier when the others have given
    up.

    Their deadline is short from when both of them wait. Before, it would also bound how long
    processes take to start.
    """
    if rank == world - 1:
        stay_out(group, rank, world)
        try:
            group.barrier()
        except EngineLost as error:
            return time.monotonic(), type(error).__name__, str(error)
        raise AssertionError("the barrier ended")

    def shorten() -> None:
        wait_until_two_wait(group.path)
        group._ranks.deadline_s = 0.5

    threading.Thread(target=shorten, daemon=True).start()
    return wait_in_barrier(group, rank, world)


def test_deadline_names_the_missing_rank_and_its_operation(path: str) -> None:
    """The rank that reaches the deadline first tells the others, and the group stays closed to the
    last one.
    """
    sent = results(start(arrive_overdue, path, 3))
    by_class = {kind: message for _, kind, message in sent}
    message = by_class.pop("CollectiveTimeout")
    told = re.fullmatch(
        r"barrier \(sequence 2\): waited (\d+\.\d) s for engine 12 \(process \d+, at sequence 1\)",
        message,
    )
    assert told, message
    assert float(told[1]) >= 0.5
    assert by_class == {
        "GroupBroken": "barrier (sequence 2): the group was aborted because of engine 12"
    }


def test_deadline_names_a_rank_that_never_attached(path: str) -> None:
    """As above, in the first operation, and the group stays ended."""
    group = ShmGroup(path, 0, 2, deadline_s=0.05, names=["engine 4", "engine 5"])
    with pytest.raises(
        CollectiveTimeout,
        match=r"all_reduce \(sequence 1\): waited \d+\.\d s for engine 5 \(not attached\)",
    ):
        group.all_reduce(torch.ones(1))
    with pytest.raises(EngineLost, match="aborted because of engine 5"):
        group.broadcast(torch.ones(1), 0)
    group.close()


def wait_until_two_wait(group_path: str) -> None:
    """Return when ranks 0 and 1 have published operation 2."""
    watched = Path(group_path)
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        if watched.exists() and watched.stat().st_size:
            with watched.open("rb") as file:
                header = memoryview(file.read(shm_kernels.HEADER_BYTES)).cast("q")
            if all(header[word(rank, FLAG)] >= 2 for rank in (0, 1)):
                return
        time.sleep(0.005)
    raise AssertionError("the ranks do not wait")


def test_killed_rank_is_an_error_not_a_hang(path: str) -> None:
    """The others see the system drop its lock."""
    started = start(wait_in_barrier, path, 3, range(2)) + start(stay_out, path, 3, range(2, 3))
    wait_until_two_wait(path)
    begin_s = time.monotonic()
    started[2][0].kill()
    sent = results(started[:2])
    started[2][0].join()
    assert all(at_s - begin_s < DEADLINE_S and kind == "GroupBroken" for at_s, kind, _ in sent)
    assert any("exited or closed: engine 12 (process" in message for _, _, message in sent)


def interrupted(group: ShmGroup, rank: int, world: int) -> Any:
    """Wait in a barrier; rank 0 is interrupted there."""
    if rank:
        return wait_in_barrier(group, rank, world)
    group.all_reduce(torch.ones(3))
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupt() -> None:
        wait_until_two_wait(group.path)
        signal.raise_signal(signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        group.barrier()
    return None


def test_an_interrupt_is_served_and_ends_the_group(path: str) -> None:
    """A signal handler runs while its process waits, and the ranks that wait with it are told."""
    _, (_, kind, message), _ = results(
        start(interrupted, path, 3, range(2)) + start(stay_out, path, 3, range(2, 3))
    )
    assert kind == "GroupBroken"
    assert message == "barrier (sequence 2): the group was aborted because of engine 10"


def test_abort_from_another_thread(path: str) -> None:
    """`abort` while another thread waits, and afterwards."""
    group = ShmGroup(path, 0, 2)
    threading.Timer(0.05, group._ranks.abort, [1]).start()
    for _ in range(2):
        with pytest.raises(EngineLost, match="rank 1"):
            group.barrier()
    group._ranks.abort(0)
    with pytest.raises(EngineLost, match="rank 1"):
        group.barrier()
    group.close()
    group._ranks.abort(0)


# ---- a machine that is stopped


PAUSE_S, SHORT_DEADLINE_S = 2.5, 2.0


def reduce_for_a_while(group: ShmGroup, rank: int, world: int) -> int:
    """All-reduce for some seconds. The last rank is slower, so that the other waits: at once with
    looks at the clock, as 500 yields to others last for seconds on a busy machine.
    """
    shm.YIELDS = 0
    group.barrier()
    group._ranks.deadline_s = SHORT_DEADLINE_S
    count, until_s = 0, time.monotonic() + PAUSE_S + 1.0
    goes_on = torch.ones(1)
    while goes_on.item():
        if rank == world - 1:
            time.sleep(0.4)
        goes_on = torch.tensor([float(rank == 0 and time.monotonic() < until_s)])
        group.all_reduce(goes_on)
        count += 1
    return count


def test_a_machine_that_was_stopped_loses_no_rank(path: str) -> None:
    """All ranks are, for longer than the deadline; the first that goes on finds the others late."""
    started = start(reduce_for_a_while, path, 2, deadline_s=DEADLINE_S)
    wait_until_two_wait(path)
    time.sleep(0.2)  # the slower rank is between two collectives
    pids = [process.pid for process, _ in started if process.pid is not None]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(PAUSE_S)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.3)
    counts = results(started)
    assert len(set(counts)) == 1 and counts[0] > 1, counts
