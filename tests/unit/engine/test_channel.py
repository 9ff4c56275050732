"""Channel: whatever engines send at the same time, all members receive in one order, each message
once.
"""

import os
import pickle
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from itertools import combinations
from tempfile import TemporaryDirectory

import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from flying_serving.comm.order import SequenceNumbers
from flying_serving.engine.channel import Channel
from flying_serving.engine.messages import (
    BlocksReserved,
    LendBlocks,
    Message,
    ReclaimBlocks,
    ReserveBlocks,
    ReturnBlocks,
    RunStep,
)
from flying_serving.errors import EngineLost
from flying_serving.layout.groups import Group, Layout
from harness.examples import examples

ENGINES = 4
GROUPS = [group for size in (1, 2, 4) for group in Layout.uniform(ENGINES, size).groups]
DEADLINE_S = 60.0


@pytest.fixture
def run_dir() -> Iterator[str]:
    """Yield a directory for sockets."""
    with TemporaryDirectory(dir="/dev/shm") as directory:
        yield directory


class Inbox:
    """An engine's channel and what it does with it: send what is planned, receive what is to
    come.
    """

    def __init__(self, run_dir: str, engine: int) -> None:
        self.arrived = threading.Event()
        self.channel = Channel(run_dir, engine, ENGINES, self.arrived.set)
        self.received: list[Message] = []

    def receive(self, count: int) -> list[Message]:
        """Receive so many messages; sleep when there is none, and rely on `wake` to be called."""
        until = time.monotonic() + DEADLINE_S
        while len(self.received) < count:
            self.arrived.clear()
            if self.channel.pending():
                self.received.append(self.channel.receive())
            else:
                assert self.arrived.wait(max(0.0, until - time.monotonic())), (
                    "a message did not arrive, or nobody was woken"
                )
        return self.received

    def run(self, plan: list[tuple[Group, Message]], expected: int, seed: int) -> list[Message]:
        """Send the plan, and receive in between at random."""
        chance = random.Random(seed)
        for group, message in plan:
            self.channel.send(group, message)
            while chance.random() < 0.5 and self.channel.pending():
                self.received.append(self.channel.receive())
        return self.receive(expected)


@settings(max_examples=examples(15), deadline=None)
@given(
    plans=st.lists(
        st.lists(st.sampled_from(GROUPS), min_size=0, max_size=60),
        min_size=ENGINES,
        max_size=ENGINES,
    ),
    seed=st.integers(0, 1000),
)
def test_all_members_receive_in_one_order(plans: list[list[Group]], seed: int) -> None:
    """Four engines send at the same time to groups that nest, themselves in them or not."""
    messages = [
        [(g, ReclaimBlocks(g, sender, n)) for n, g in enumerate(plan)]
        for sender, plan in enumerate(plans)
    ]
    expected = [sum(e in group for plan in plans for group in plan) for e in range(ENGINES)]
    with (
        TemporaryDirectory(dir="/dev/shm") as run_dir,
        ExitStack() as stack,
        ThreadPoolExecutor(ENGINES) as pool,
    ):
        inboxes = [Inbox(run_dir, engine) for engine in range(ENGINES)]
        for inbox in inboxes:
            stack.callback(inbox.channel.close)
        running = [
            pool.submit(inbox.run, messages[e], expected[e], seed + e)
            for e, inbox in enumerate(inboxes)
        ]
        received = [run.result(timeout=DEADLINE_S) for run in running]
        assert not any(inbox.channel.pending() for inbox in inboxes)
    for engine, mine in enumerate(received):
        sent = [message for plan in messages for group, message in plan if engine in group]
        assert sorted(mine, key=repr) == sorted(sent, key=repr)
        for sender in range(ENGINES):
            of_sender = [message.count for message in mine if message.engine == sender]  # type: ignore[union-attr]
            assert of_sender == sorted(of_sender)
    for one, other in combinations(received, 2):
        common = set(one) & set(other)
        assert [message for message in one if message in common] == [
            message for message in other if message in common
        ]


def test_early_message_waits_for_the_messages_before_it(run_dir: str) -> None:
    """Numbers decide, not the time of arrival."""
    inbox = Inbox(run_dir, 0)
    order = SequenceNumbers(f"{run_dir}/order", ENGINES)
    order.join(1)
    context = zmq.Context()
    overdue, early = (context.socket(zmq.PUSH) for _ in range(2))
    for socket in (overdue, early):
        socket.connect(f"ipc://{run_dir}/inbox-0")
    numbers = [order.take(1, [0])[0] for _ in range(3)]
    messages = [ReclaimBlocks((0, 1), 1, count) for count in (10, 11, 12)]

    def deliver(socket: "zmq.Socket[bytes]", which: int) -> None:
        inbox.arrived.clear()
        socket.send_multipart([numbers[which].to_bytes(8, "little"), pickle.dumps(messages[which])])
        assert inbox.arrived.wait(DEADLINE_S)

    assert inbox.channel.pending()  # numbered, so on its way
    deliver(early, 2)
    deliver(early, 1)
    own = ReclaimBlocks((0, 1), 0, 13)
    inbox.channel.send([0], own)  # this engine's own messages wait too
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(inbox.receive, 1)
        assert wait([first], timeout=0.1).not_done
        deliver(overdue, 0)
        assert first.result(DEADLINE_S) == messages[:1]
    assert inbox.receive(4) == [*messages, own]
    assert not inbox.channel.pending()
    for socket in (overdue, early):
        socket.close(0)
    context.term()
    order.close()
    inbox.channel.close()


def test_a_message_of_an_engine_that_has_died_is_none(run_dir: str) -> None:
    """It took the number, and died before it sent the message; what others have sent comes all the
    same.
    """
    dies, lives = SequenceNumbers(f"{run_dir}/order", ENGINES), Inbox(run_dir, 1).channel
    channel = Channel(run_dir, 2, ENGINES, lambda: None)
    dies.join(3)
    dies.take(3, [1, 2])
    message = ReclaimBlocks((2, 3), 1, 5)
    lives.send([2], message)
    assert channel.waiting() == 2
    dies.close()
    assert [channel.receive(), channel.receive()] == [None, message]
    assert not channel.pending()
    for each in (channel, lives):
        each.close()


def test_restarted_engine_gets_no_message_of_its_former_life(run_dir: str) -> None:
    """Neither what was on its way when it died, nor numbers that were taken for it."""
    sender, first = Inbox(run_dir, 0).channel, Channel(run_dir, 1, ENGINES, lambda: None)
    sender.send([1], ReclaimBlocks((0, 1), 0, 1))
    first.close()
    sender.send(
        [1], ReclaimBlocks((0, 1), 0, 2)
    )  # to nobody: it is kept for the socket's next peer
    inbox = Inbox(run_dir, 1)
    assert not inbox.channel.pending()
    message = ReclaimBlocks((0, 1), 0, 3)
    sender.send([1], message)
    assert inbox.receive(1) == [message]
    for each in (sender, inbox.channel):
        each.close()


def test_a_message_that_is_not_sent_is_an_error(run_dir: str) -> None:
    """Whoever took its number lives, but is stopped."""
    order = SequenceNumbers(f"{run_dir}/order", ENGINES)
    order.join(3)
    channel = Channel(run_dir, 2, ENGINES, lambda: None, deadline_s=0.05)
    order.take(3, [2, 3])
    assert channel.pending()
    with pytest.raises(EngineLost, match=r"engine 2: engine 3 .* did not send it for 0.05 s"):
        channel.receive()
    order.close()
    channel.close()


def test_what_is_not_pending_cannot_be_received(run_dir: str) -> None:
    """Nobody has taken its number; to ask who has could take it for lost. It is none then."""
    one, two = (Channel(run_dir, engine, ENGINES, lambda: None, 5.0) for engine in (1, 2))
    with pytest.raises(AssertionError, match="no message"):
        one.receive()
    messages = [ReclaimBlocks((1, 2), 2, count) for count in (1, 2)]
    for message in messages:
        two.send([1], message)
    assert [one.receive(), one.receive()] == messages
    assert not one.pending()
    for each in (one, two):
        each.close()


def test_every_kind_of_message_arrives_as_it_was_sent(run_dir: str) -> None:
    """By value at the others; at the sender itself the very object, which costs nothing."""
    group = (0, 1)
    messages: list[Message] = [
        RunStep(group, {"plan": [1, 2]}, None, more=True),
        ReserveBlocks(group, 7, needed=0),
        LendBlocks(group, [1, 2, 3]),
        ReturnBlocks(group, [3]),
        BlocksReserved(group, 1, 4),
        ReclaimBlocks(group, 1, 2),
    ]
    inboxes = [Inbox(run_dir, engine) for engine in range(2)]
    for message in messages:
        inboxes[0].channel.send(group, message)
    assert inboxes[1].receive(len(messages)) == messages
    mine = inboxes[0].receive(len(messages))
    assert all(got is sent for got, sent in zip(mine, messages, strict=True))
    for inbox in inboxes:
        inbox.channel.close()


def test_sending_to_a_group_without_oneself(run_dir: str) -> None:
    """As a member does with a BlocksReserved for its leader."""
    inboxes = [Inbox(run_dir, engine) for engine in range(ENGINES)]
    inboxes[3].channel.send([2], BlocksReserved((2, 3), 3, 5))
    assert inboxes[2].receive(1) == [BlocksReserved((2, 3), 3, 5)]
    assert not any(inboxes[engine].channel.pending() for engine in (0, 1, 3))
    for inbox in inboxes:
        inbox.channel.close()


def test_engine_that_stops_reading_is_lost_and_not_waited_for(run_dir: str) -> None:
    """Sending never blocks: when an engine's queue is full, it raises; but what a dead engine does
    not take is lost.
    """
    channel, stopped = (
        Channel(run_dir, 0, ENGINES, lambda: None),
        SequenceNumbers(f"{run_dir}/order", ENGINES),
    )
    stopped.join(3)
    with pytest.raises(EngineLost, match="engine 3 does not take messages"):
        for count in range(100_000):
            channel.send([3], ReclaimBlocks((0, 1, 2, 3), 0, count))
    assert count >= 100
    stopped.close()
    channel.send([3], ReclaimBlocks((0, 1, 2, 3), 0, count))
    channel.send([0], ReclaimBlocks((0, 1), 0, 1))
    assert channel.pending()
    channel.close()


def test_close_leaves_no_thread_and_no_descriptor(run_dir: str) -> None:
    """No thread and no file descriptor, messages under way or not."""
    inboxes = [Inbox(run_dir, engine) for engine in range(ENGINES)]
    for inbox in inboxes:
        inbox.channel.close()
    descriptors, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(3):
        inboxes = [Inbox(run_dir, engine) for engine in range(ENGINES)]
        inboxes[0].channel.send([0, 1, 2, 3], ReclaimBlocks((0, 1), 0, 1))
        for inbox in inboxes:
            inbox.channel.close()
            inbox.channel._listener.join(DEADLINE_S)
            assert not inbox.channel._listener.is_alive()
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert threading.active_count() == threads
