"""Router: the least loaded group that suits, a degree that is asked for exactly, and what can never run refused."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from flying_serving.controller.capacity import Capacity
from flying_serving.controller.routing import Router, Wanted
from flying_serving.errors import RequestError
from flying_serving.layout.groups import Group, Layout

SIZES = (1, 2, 4)
LAYOUTS = [
    Layout.uniform(4, 1),
    Layout.uniform(4, 2),
    Layout.uniform(4, 4),
    Layout(((0, 1), (2,), (3,))),
    Layout(((0,), (1,), (2, 3))),
]
GROUPS = [group for size in SIZES for group in Layout.uniform(4, size).groups]


def router(layout: Layout, devices: int = 1, tokens: tuple[int, int, int] = (100, 200, 400)) -> Router:
    """Return a router whose groups of one, two and four engines hold so many tokens."""
    return Router(layout, Capacity(dict(zip(SIZES, tokens, strict=True)), devices))


def test_the_least_loaded_group_gets_the_next_request() -> None:
    """By requests per engine; the first one if several are as idle, the narrower one if it has fewer requests."""
    one = router(Layout(((0, 1), (2,), (3,))))
    placed = []
    for number in range(8):
        group = one.place(Wanted(50))
        assert group is not None
        one.started(str(number), group)
        placed.append(group)
    assert placed == [(0, 1), (2,), (3,), (0, 1), (2,), (3,), (0, 1), (0, 1)]
    one.finished("1")
    assert one.place(Wanted(50)) == (2,)


def test_a_long_request_goes_where_it_fits_or_waits() -> None:
    """However idle the others are."""
    mixed = router(Layout(((0, 1), (2,), (3,))))
    for number in range(9):
        mixed.started(str(number), (0, 1))
    assert mixed.place(Wanted(100)) == (2,)
    assert mixed.place(Wanted(101)) == (0, 1)
    assert mixed.place(Wanted(200)) == (0, 1)
    assert mixed.place(Wanted(201)) is None


def test_a_degree_that_is_asked_for_is_met_exactly() -> None:
    """By a group of the layout, or by any group of that size if it has none."""
    one = router(Layout(((0, 1), (2,), (3,))))
    assert one.place(Wanted(10, degree=2)) == (0, 1)
    one.started("a", (0, 1))
    assert one.place(Wanted(10, degree=2)) == (0, 1)
    assert one.place(Wanted(10, degree=1)) == (2,)
    assert one.place(Wanted(10, degree=4)) == (0, 1, 2, 3)
    wide = router(Layout.uniform(4, 4))
    wide.started("a", (0, 1))
    assert wide.place(Wanted(10, degree=2)) == (2, 3)


def test_degrees_count_devices() -> None:
    """With two devices each, degree 2 is one engine."""
    one = router(Layout.uniform(4, 2), devices=2)
    assert one.place(Wanted(10, degree=4)) == (0, 1)
    assert one.place(Wanted(10, degree=2)) == (0,)
    with pytest.raises(RequestError, match=r"tp_degree=1: must be one of \[2, 4, 8\]"):
        one.check(Wanted(10, degree=1))


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (Wanted(10, degree=3), r"tp_degree=3: must be one of \[1, 2, 4\]"),
        (Wanted(10, degree=0), r"tp_degree=0: must be one of \[1, 2, 4\]"),
        (Wanted(101, degree=1), "tp_degree=1: its KV cache holds 100 tokens, .* are 101; degree 2 would do"),
        (Wanted(201, degree=1), "degree 4 would do"),
        (Wanted(401, degree=4), "holds 400 tokens, .* are 401; no degree of this server holds them"),
        (Wanted(401), r"prompt plus max_tokens are 401 tokens; the widest group \(degree 4\) holds 400"),
    ],
)
def test_what_can_never_run_is_refused_with_what_would_do(wanted: Wanted, message: str) -> None:
    """In every layout alike."""
    for layout in LAYOUTS:
        with pytest.raises(RequestError, match=message):
            router(layout).check(wanted)


@settings(max_examples=200)
@given(
    layout=st.sampled_from(LAYOUTS),
    devices=st.sampled_from([1, 2]),
    tokens=st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9)).map(lambda t: tuple(sorted(t))),
    needed=st.integers(1, 10),
    degree=st.none() | st.integers(0, 9),
    load=st.lists(st.sampled_from(GROUPS), max_size=20),
)
def test_what_passes_the_check_can_be_placed(
    layout: Layout,
    devices: int,
    tokens: tuple[int, int, int],
    needed: int,
    degree: int | None,
    load: list[Group],
) -> None:
    """Now, or in some other layout; where it is placed it fits; what does not pass fits nowhere."""
    wanted = Wanted(needed, degree)
    sizes = [
        size for size, holds in zip(SIZES, tokens, strict=True) if holds >= needed and degree in (None, size * devices)
    ]
    one = router(layout, devices, tokens)
    for number, group in enumerate(load):
        one.started(str(number), group)
    if not sizes:
        with pytest.raises(RequestError):
            one.check(wanted)
        return
    one.check(wanted)
    group = one.place(wanted)
    if group is None:
        assert degree is None
        assert not any(len(g) in sizes for g in layout.groups)
        assert any(router(other, devices, tokens).place(wanted) for other in LAYOUTS)
        return
    assert len(group) in sizes
    suiting = [g for g in layout.groups if len(g) in sizes]
    assert group in (suiting or GROUPS)
    counts = Counter(load)
    assert all(counts[group] / len(group) <= counts[g] / len(g) for g in suiting)


class Books(RuleBasedStateMachine):
    """Requests that come, run, end twice or never ran, while layouts change: what is counted is what runs."""

    requests = Bundle("requests")

    @initialize(layout=st.sampled_from(LAYOUTS))
    def begin(self, layout: Layout) -> None:
        self.router = router(layout)
        self.where: dict[str, Group] = {}
        self.count = 0

    @rule(target=requests, group=st.sampled_from(GROUPS))
    def start(self, group: Group) -> str:
        self.count += 1
        name = f"r{self.count}"
        self.router.started(name, group)
        self.where[name] = group
        return name

    @rule(request=requests)
    def finish(self, request: str) -> None:
        assert self.router.finished(request) == self.where.pop(request, None)
        assert self.router.group_of(request) is None

    @rule()
    def finish_what_never_ran(self) -> None:
        assert self.router.finished("never") is None

    @rule(layout=st.sampled_from(LAYOUTS))
    def switch(self, layout: Layout) -> None:
        expected = {request for request, group in self.where.items() if group not in layout.groups}
        assert self.router.draining(layout) == expected
        self.router.layout = layout

    @invariant()
    def counted(self) -> None:
        if not hasattr(self, "router"):
            return
        assert dict(self.router.load) == dict(Counter(self.where.values()))
        assert self.router.running == len(self.where)
        assert all(self.router.group_of(request) == group for request, group in self.where.items())


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
