"""What every kind of model goes through: degrees, switches, migrations, splits and losses."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from flying_serving.config import MODES
from harness.live import wait_until
from harness.losing import is_whole, kill
from harness.streams import WORST_LOGPROB, worst_difference
from tests.deep.conformance.live import Asked, Job, Live
from tests.stock.requests import tokens

BETWEEN_S = 0.2
"""From one switch to the next: without it little else would be done."""
BACK_S = 120.0
MOST_ROUNDS = 10
"""On a fast machine few streams last until a switch comes."""
BLOCK_TOKENS = 32
"""Of a block of an engine alone. A group's block has as many for each engine."""
STEP_TOKENS = 256
"""Of a prompt that is computed in one step."""
LASTING_TOKENS = 96
MANY_JOBS = 8
"""From this many on each is split in one or two ways."""


def log(live: Live) -> None:
    """The log says what the case is."""
    said = live.log()
    for text in live.case.says:
        assert text in said
    for text in live.case.quiet:
        assert text not in said


def sharing_a_device_changes_nothing(live: Live) -> None:
    """The CPU has no memory of a device to share; the log says so."""
    assert "--engines-per-device=2: changes nothing on the CPU" in live.log()


def all_degrees_are_offered(live: Live) -> None:
    sizes = [degree // live.case.devices for degree in live.degrees]
    assert live.status()["group_sizes"] == sizes


def wider_groups_hold_more(live: Live) -> None:
    capacity = [live.capacity_tokens(degree) for degree in live.degrees]
    assert capacity == sorted(capacity)
    assert capacity[0] < capacity[-1]


def wider_groups_hold_as_much(live: Live) -> None:
    """Every member of a group has the KV of all tokens."""
    capacity = {live.capacity_tokens(degree) for degree in live.degrees}
    assert len(capacity) == 1


def alone(live: Live) -> None:
    """Some requests, one after the other, the widest groups first."""
    for degree in live.degrees[::-1]:
        for job in live.jobs(degree)[::3]:
            live.ask(Asked(job, degree))
    live.check()


def together(live: Live) -> None:
    """All requests of a degree at once, the narrowest groups first."""
    for degree in live.degrees:
        live.answer_all(Asked(job, degree) for job in live.jobs(degree))
    live.check()


def switches(live: Live) -> None:
    """Requests of all degrees at once, while groups form and part in two modes."""
    with live.asking([Asked(job, d) for d in live.degrees for job in live.jobs(d)]):
        for groups, mode in zip(live.layouts, itertools.cycle(("weave", "hard"))):
            live.layout(groups, mode)
    live.check()


def storm(live: Live) -> None:
    """To each layout in each mode. Each request stays at some degree, and goes wherever it is sent
    at the same time.
    """
    orders = list(itertools.product(MODES, live.layouts))[::-1]
    jobs, degrees = live.jobs(), itertools.cycle(live.degrees)
    while orders:
        asked = [one for job in jobs for one in (Asked(job), Asked(job, next(degrees)))]
        next(degrees)  # so that each job has another one the next time
        with live.asking(asked) as all_answered:
            while orders and not all_answered():
                mode, groups = orders.pop()
                live.layout(groups, mode)
    assert {switch["mode"] for switch in live.switches()} == set(MODES)
    live.check()


def migrations(live: Live) -> None:
    """Streams go on in other groups where they were, over and over. One of each degree stays."""
    jobs = live.jobs()
    asked = [*map(Asked, jobs), *(Asked(jobs[0], degree) for degree in live.degrees)]
    before, tokens_before = live.migrations(), live.migrations("migrated_tokens")
    for _ in range(MOST_ROUNDS):
        with live.asking(asked) as all_answered:
            migrate_until(live, all_answered)
        if live.migrations() - before >= len(jobs):
            break
    else:
        raise AssertionError(f"streams end before they have moved: {live.status()['engines']}")
    assert live.migrations("migrated_tokens") > tokens_before
    live.check()


def migrate_until(live: Live, all_answered: Callable[[], bool]) -> None:
    """Have requests go from layout to layout until all are answered."""
    for groups in itertools.cycle(live.layouts):
        if all_answered():
            return
        live.layout(groups, "migrate")
        time.sleep(BETWEEN_S)


def states_migrate(live: Live) -> None:
    """Every running request goes on where it was, and none is computed again."""
    live.layout(live.apart)
    before, again = live.migrations(), live.migrations("prefilled_again")
    jobs = [job.lengthened(LASTING_TOKENS) for job in live.jobs() if len(job.prompt) <= STEP_TOKENS]
    with live.asking([*map(Asked, jobs)]):
        wait_until(lambda: live.requests("running") == len(jobs), live.status)
        live.layout(live.groups(live.degrees[-1]), "migrate")
    assert live.migrations() - before == len(jobs)
    assert live.migrations("prefilled_again") == again
    live.check()


def splits(live: Live) -> None:
    """Two engines share each request: inside its prompt, at its end or in its output, or in all
    these ways if requests are few.
    """
    live.layout(live.apart)
    before, jobs = live.migrations(), live.jobs()
    asked = [Asked(job, None, place) for job in jobs for place in _places(job)]
    live.answer_all(asked if len(jobs) <= MANY_JOBS else asked[::2])
    assert live.migrations() > before
    live.check()


def _places(job: Job) -> tuple[int, int, int]:
    prompt = len(job.prompt)
    return prompt // 2, prompt, prompt + job.max_tokens // 2


def steps_divided_weights_and_tokens(live: Live) -> None:
    """Groups of each size have made steps of both ways by now."""
    every = live.metric("flying:step_duration_seconds_count", "group_size")
    divided = live.metric("flying:token_parallel_steps_total", "group_size")
    wide = {size: count for size, count in every.items() if size != ("1",)}
    assert divided.keys() == wide.keys()
    assert all(0 < divided[size] < count for size, count in wide.items()), (divided, wide)


def kv_of_one_way_is_read_by_the_other(live: Live) -> None:
    """Prompts end one token before, at and after the ends of blocks and of steps. Each is asked
    twice, so that its steps are of either way first. Their prefixes are cached by then.
    """
    ends = [*range(BLOCK_TOKENS, 5 * BLOCK_TOKENS, BLOCK_TOKENS), STEP_TOKENS, 2 * STEP_TOKENS]
    lengths = sorted({end + more for end in ends for more in (-1, 0, 1)})

    def ask(length: int, degree: int) -> tuple[list[int], list[float]]:
        choice = (
            live.post(tokens(length, length), 6, degree).raise_for_status().json()["choices"][0]
        )
        return choice["token_ids"], choice["logprobs"]["token_logprobs"]

    with ThreadPoolExecutor(MANY_JOBS) as pool:
        alone = dict(zip(lengths, pool.map(lambda length: ask(length, 1), lengths), strict=True))
        for degree in live.degrees[1:] * 2:
            found = pool.map(lambda length, degree=degree: ask(length, degree), lengths)
            for length, (drawn, logprobs) in zip(lengths, found, strict=True):
                assert drawn == alone[length][0], (length, degree)
                assert worst_difference(logprobs, alone[length][1]) <= WORST_LOGPROB
    live.check()


def loss(live: Live) -> None:
    """An engine is lost under running requests. Its groups answer as before when it is back."""
    degree = 2 * live.case.devices
    live.layout(live.groups(degree))
    jobs = live.jobs(degree)
    with live.asking([Asked(job, degree) for job in jobs]):
        wait_until(lambda: live.requests("running") >= min(4, len(jobs)), live.status)
        kill(live, 1)
    wait_until(lambda: is_whole(live), live.log, BACK_S)
    for left in (degree, live.degrees[0]):
        live.answer_all(Asked(job, left) for job in live.jobs(left)[::2])
    live.check()
