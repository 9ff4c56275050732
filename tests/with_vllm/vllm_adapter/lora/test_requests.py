"""Requests with adapters in a lane's scheduler: none waits for ever for a slot, and those of an
adapter that an engine lacked end with an error.
"""

from vllm.v1.request import Request, RequestStatus

from flying_serving.layout.groups import Group
from flying_serving.vllm_adapter.lora.requests import AdapterRequests
from tests.with_vllm.engine.schedulers import Hooks
from tests.with_vllm.vllm_adapter.kv_lanes import KVLane, make

AGING_S = 30.0
BUSY, OTHER, THIRD = 1, 2, 3
"""Adapters."""


class Slots:
    """A lane with few slots, and requests of a busy adapter that come as others end: each of a
    prompt of one token and a few outputs, one second a step. They do not end together.
    """

    def __init__(self, *, overlaps: bool, slots: int = 1) -> None:
        self.lane = KVLane(overlaps=overlaps, max_loras=slots)
        self.now_s = 100.0
        self.begun_s: dict[str, float] = {}
        self._count = 0
        scheduler = self.lane.scheduler
        scheduler.clock = lambda: self.now_s
        scheduler.adapters.aging_s = AGING_S

    @property
    def running(self) -> list[Request]:
        found: list[Request] = self.lane.scheduler.running
        return found

    def add(self, name: str, adapter: int | None, outputs: int | None = None) -> Request:
        self._count += 1
        outputs = (5, 17, 8, 13, 11)[self._count % 5] if outputs is None else outputs
        made = make(name, 1 + self._count, 1, outputs, adapter=adapter)
        self.lane.scheduler.add_request(made)
        return made

    def step(self) -> None:
        self.now_s += 1.0
        self.lane.step()
        for request in self.running:
            self.begun_s.setdefault(request.request_id, self.now_s)

    def keep_busy(self, *adapters: int | None) -> None:
        """Some requests run and some wait, of each of these adapters."""
        waiting = len(self.lane.scheduler.requests) - len(self.running)
        for _ in range(4 - waiting):
            for adapter in adapters:
                self.add(f"{adapter} {self._count}", adapter)

    def until_begun(self, name: str, *busy: int | None, most_s: int = 200) -> float:
        """Step beside requests of busy adapters. Returns how long the request has waited."""
        since_s = self.now_s
        for _ in range(most_s):
            self.keep_busy(*busy)
            self.step()
            if name in self.begun_s:
                return self.begun_s[name] - since_s
        raise AssertionError(f"{name} has not begun in {most_s} s")


def test_a_request_gets_a_slot_beside_a_busy_adapter(overlaps: bool) -> None:
    """Soon after it has aged: when the running ones have ended."""
    slots = Slots(overlaps=overlaps)
    slots.keep_busy(BUSY)
    slots.step()
    slots.add("other", OTHER)
    assert AGING_S - 1 <= slots.until_begun("other", BUSY) <= AGING_S + 20


def test_requests_without_an_adapter_begin_meanwhile(overlaps: bool) -> None:
    slots = Slots(overlaps=overlaps)
    slots.add("busy", BUSY, outputs=50)
    slots.step()
    slots.add("other", OTHER)
    slots.now_s += AGING_S
    slots.step()
    slots.add("late", BUSY)
    slots.add("base", None)
    slots.step()
    assert {request.request_id for request in slots.running} == {"busy", "base"}


def test_two_adapters_take_turns(overlaps: bool) -> None:
    """Each has the slot for a while: with each change the batch runs empty."""
    slots = Slots(overlaps=overlaps)
    held: list[int] = []
    for _ in range(300):
        slots.keep_busy(BUSY, OTHER)
        slots.step()
        (adapter,) = {request.lora_request.lora_int_id for request in slots.running} or {0}
        if adapter and (not held or held[-1] != adapter):
            held.append(adapter)
    assert 6 <= len(held) <= 300 / AGING_S + 2


def test_all_adapters_get_a_slot_in_the_order_of_their_first_request(overlaps: bool) -> None:
    slots = Slots(overlaps=overlaps)
    slots.keep_busy(BUSY)
    slots.step()
    slots.add("third", THIRD)
    slots.step()
    slots.add("other", OTHER)
    assert slots.until_begun("other", BUSY) <= 2 * AGING_S + 40
    assert slots.begun_s["third"] < slots.begun_s["other"]


def test_with_two_slots_one_of_the_busy_adapters_goes_on(overlaps: bool) -> None:
    slots = Slots(overlaps=overlaps, slots=2)
    slots.keep_busy(BUSY, OTHER)
    slots.step()
    slots.add("third", THIRD)
    assert slots.until_begun("third", BUSY, OTHER) <= AGING_S + 20


def test_a_request_that_has_begun_goes_on_while_a_slot_is_kept() -> None:
    """One that has come with its KV, or was preempted: it may hold the blocks that are needed."""
    slots = Slots(overlaps=False)
    slots.add("busy", BUSY, outputs=50)
    slots.step()
    slots.add("other", OTHER)
    slots.now_s += AGING_S
    slots.step()
    came = make("came", 9, 9, 4, adapter=BUSY)
    assert slots.lane.pool.prepare(came, 8) is not None
    slots.lane.pool.arrived(came, 8)
    slots.lane.scheduler.add_request(came)
    slots.step()
    assert "came" in slots.begun_s
    assert "other" not in slots.begun_s


def test_no_slot_is_kept_for_a_request_that_has_left() -> None:
    slots = Slots(overlaps=False)
    slots.add("busy", BUSY, outputs=50)
    slots.step()
    slots.add("other", OTHER)
    slots.now_s += AGING_S
    slots.add("late", BUSY)
    slots.step()
    assert "late" not in slots.begun_s
    slots.lane.abort("other")
    slots.step()
    assert "late" in slots.begun_s


def test_requests_that_wait_for_something_else_get_no_slot() -> None:
    """A grammar that is compiled, or a client that has more of its prompt to send."""
    adapters = AdapterRequests(1, AGING_S)
    adapters.arrived(OTHER, "compiled", 0.0)
    adapters.arrived(OTHER, "waits", 5.0)
    assert adapters.keep({BUSY}, {"waits"}.__contains__, AGING_S) is None
    assert adapters.keep({BUSY}, {"waits"}.__contains__, AGING_S + 5) == OTHER
    assert adapters.keep({BUSY}, lambda _: False, AGING_S + 6) is None


# ---- adapters that an engine lacked in a step


class Failing:
    """A lane whose engine lacks adapters, and the requests that end with an error."""

    def __init__(self, *, overlaps: bool) -> None:
        self.lane = KVLane(overlaps=overlaps, max_loras=2)
        self.now_s = 100.0
        self.lacking: dict[int, tuple[float, str]] = {}
        self.ended: dict[str, str] = {}
        scheduler = self.lane.scheduler
        scheduler.clock = lambda: self.now_s
        scheduler.notes = self
        scheduler.hooks = Hooks(requests_failed=self._failed)

    def failure(self, _group: Group, adapter: int, since_s: float) -> str | None:
        at_s, why = self.lacking.get(adapter, (-1.0, ""))
        return why if at_s >= since_s else None

    def _failed(self, requests: list[Request], why: str) -> None:
        assert all(request.status == RequestStatus.FINISHED_ERROR for request in requests)
        self.ended |= {request.request_id: why for request in requests}

    def add(self, name: str, adapter: int | None, family: int, prompt: int = 5) -> Request:
        made = make(name, family, prompt, 6, adapter=adapter)
        self.lane.scheduler.add_request(made)
        return made


def test_all_requests_of_the_adapter_end_with_the_error(overlaps: bool) -> None:
    """Those that wait too; no token of the step is taken, and the others go on."""
    failing = Failing(overlaps=overlaps)
    first = failing.add("first", BUSY, 1)
    failing.add("other", OTHER, 2)
    failing.add("base", None, 3)
    failing.lane.step()
    failing.lane.settle()
    had = first.num_output_tokens
    for number in range(4):
        failing.add(f"late {number}", BUSY, 4 + number)
    failing.lacking[BUSY] = failing.now_s, "no file"
    failing.lane.schedule()
    failing.lane.settle()
    assert set(failing.ended) == {"first", *(f"late {number}" for number in range(4))}
    assert set(failing.ended.values()) == {"no file"}
    assert first.num_output_tokens == had
    failing.lacking.clear()
    while failing.lane.scheduler.requests:
        failing.lane.step()
    failing.lane.settle()
    failing.lane.pool.check(set())
    assert failing.lane.free() == failing.lane.pool.total


def test_blocks_of_such_a_step_are_no_prefixes(overlaps: bool) -> None:
    """They were computed without the adapter."""
    failing = Failing(overlaps=overlaps)
    failing.add("first", BUSY, 1, prompt=8)
    failing.lacking[BUSY] = failing.now_s, "no file"
    failing.lane.step()
    failing.lane.settle()
    assert set(failing.ended) == {"first"}
    failing.lacking.clear()
    failing.add("again", BUSY, 1, prompt=8)
    failing.lane.step()
    assert failing.lane.scheduler.cached_tokens == {"again": 0}


def test_a_failure_of_before_ends_no_request(overlaps: bool) -> None:
    failing = Failing(overlaps=overlaps)
    failing.lacking[BUSY] = failing.now_s, "no file"
    failing.now_s += 1
    failing.add("later", BUSY, 1)
    while failing.lane.scheduler.requests:
        failing.lane.step()
    failing.lane.settle()
    assert failing.ended == {}
