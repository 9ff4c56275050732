"""Controller under any sequence of events, for every policy; ModelShell checks each command."""

from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from flying_serving.controller.requests import RequestSpec
from harness.examples import examples
from tests.unit.controller.episodes import (
    MOST_WAITING,
    Episode,
    long_or_narrow,
    shareable,
    underestimated,
)
from tests.unit.controller.mortal import MortalShell


class Automatic(Episode):
    """Those that change the layout by themselves."""

    names = ("auto", "context")


class Manual(Episode):
    """An operator changes it, in every way there is."""

    names = ("manual",)


class Crowded(Episode):
    """An operator migrates streams to groups that have not room for all of them."""

    names = ("manual",)
    limited = True

    @precondition(lambda self: not self.shell.controller.changeover.is_under_way)
    @rule(data=st.data(), count=st.integers(1, 8))
    def migrate_many(self, data: st.DataObject, count: int) -> None:
        """Short requests come, those that find room get a token, and the layout changes."""
        for _ in range(min(count, MOST_WAITING - len(self.shell.waiting()))):
            self.count += 1
            self.shell.arrive(f"r{self.count}", RequestSpec(10, 20, 10))
            if self.shell.open[f"r{self.count}"].group is not None:
                self.shell.token(f"r{self.count}")
        self.shell.order(data.draw(st.sampled_from(self.layouts)), "migrate")
        if self.shell.ordered is not None:  # it may wait for weights
            self.shell.acknowledge()


class Shared(Episode):
    """Two groups share many requests, which run to the split, are aborted, or lose a group or a
    part before.
    """

    names = ("split", "manual", "auto")
    wishes = staticmethod(shareable)
    migrates: frozenset[int] | None = frozenset({2})

    @precondition(lambda self: self.shell.parts)
    @rule(data=st.data())
    def to_the_split(self, data: st.DataObject) -> None:
        """A request has as many tokens as its first group gives it, or its prefix has ended."""
        number = data.draw(st.sampled_from(sorted(self.shell.parts)))
        part = self.shell.parts[number]
        if part.is_ahead:
            self.shell.token(part.request_id, 1000)
        else:
            self.shell.end_prefix(number)


class Longer(Shared):
    """Requests get longer than they were planned for, beside others that end."""

    names = ("split",)
    wishes = staticmethod(underestimated)

    @precondition(lambda self: len(self.shell.waiting()) <= MOST_WAITING - 4)
    @rule(data=st.data(), count=st.integers(20, 40))
    def outlast(self, data: st.DataObject, count: int) -> None:
        """Requests come and get a token each, those of other groups than one end, and that one
        gets many tokens.
        """
        for _ in range(4):
            self.count += 1
            self.shell.arrive(f"r{self.count}", data.draw(self.wishes(self.most_tokens)))
        for name in self.shell.running():
            if name in self.shell.open and self.shell.open[name].group is not None:
                self.shell.token(name)
        if not self.shell.running():
            return
        lasting = data.draw(st.sampled_from(self.shell.running()))
        group = self.shell.open[lasting].group
        others = [one for one in self.shell.running() if self.shell.open[one].group != group]
        self.shell.finish(*others)
        self.shell.token(lasting, count)
        self.shell.tick()


class Lending(Episode):
    """Long requests that need lent weights beside others that need narrow groups; an operator
    changes the layout.
    """

    names = ("manual", "auto")
    wishes = staticmethod(long_or_narrow)
    always_lends = True

    @precondition(lambda self: len(self.shell.open) <= MOST_WAITING - 3)
    @rule(narrow_first=st.booleans())
    def long_beside_narrow(self, narrow_first: bool) -> None:
        """A long request comes while a narrower group runs one, and another one for it comes
        after.
        """
        long = RequestSpec(self.most_tokens - 4, self.most_tokens - 3, 1)
        for spec in [RequestSpec(5, 10, 5, degree=1)] * narrow_first + [
            long,
            RequestSpec(5, 10, 5, degree=1),
        ]:
            self.count += 1
            self.shell.arrive(f"r{self.count}", spec)

    @precondition(lambda self: self.shell.open)
    @rule(passed_s=st.floats(0.0, 20.0))
    def go_on(self, passed_s: float) -> None:
        """All engines do what they have been told."""
        if self.shell.ordered is not None:
            self.shell.acknowledge()
        for group in self.shell.going():
            self.shell.answer_weights(group)
        self.shell.tick(passed_s)


class Mortal(Episode):
    """Engines die and come back; whatever happened, all that is open ends when they are there."""

    shell: MortalShell
    made = staticmethod(MortalShell)
    survives = True

    @precondition(lambda self: len(self.shell.lost) < self.shell.controller.settings.engines)
    @rule(data=st.data(), killed=st.booleans())
    def lose(self, data: st.DataObject, killed: bool) -> None:
        there = set(range(self.shell.controller.settings.engines)) - self.shell.lost
        self.shell.lose(data.draw(st.sampled_from(sorted(there))), killed=killed)

    @precondition(lambda self: self.shell.lost)
    @rule(data=st.data())
    def revive(self, data: st.DataObject) -> None:
        self.shell.revive(data.draw(st.sampled_from(sorted(self.shell.lost))))

    @precondition(lambda self: self.shell.open)
    @rule()
    def go_on(self) -> None:
        """Engines do what they have been told."""
        if self.shell.ordered is not None:
            self.shell.acknowledge()
        for request_id in self.shell.running():
            if request_id in self.shell.open and self.shell.open[request_id].group is not None:
                self.shell.token(request_id)

    def teardown(self) -> None:
        """The layout that an operator had ordered is there again."""
        if hasattr(self, "shell"):
            for engine in sorted(self.shell.lost):
                self.shell.revive(engine)
        super().teardown()
        if hasattr(self, "shell"):
            assert self.shell.to_restore in (None, self.shell.layout)


class MortalShared(Mortal, Shared):
    """The same, while groups share requests."""


TestEveryPolicy = Episode.TestCase
TestAutomatic = Automatic.TestCase
TestManual = Manual.TestCase
TestCrowded = Crowded.TestCase
TestShared = Shared.TestCase
TestLonger = Longer.TestCase
TestLending = Lending.TestCase
TestMortal = Mortal.TestCase
TestMortalShared = MortalShared.TestCase
CASES = (
    TestEveryPolicy,
    TestAutomatic,
    TestManual,
    TestCrowded,
    TestShared,
    TestLonger,
    TestLending,
    TestMortal,
    TestMortalShared,
)
for case in CASES:
    case.settings = hypothesis_settings(max_examples=examples(120), stateful_step_count=40)
