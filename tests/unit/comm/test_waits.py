"""WaitTime: a process that was stopped has not waited meanwhile."""

from flying_serving.comm.waits import WaitTime


def test_looks_add_up() -> None:
    wait = WaitTime()
    assert [wait.look(now_s) for now_s in (100.0, 100.25, 100.25, 101.0)] == [0.0, 0.25, 0.0, 0.75]
    assert wait.waited_s == 1.0


def test_time_between_two_looks_counts_as_a_second_at_most() -> None:
    wait = WaitTime()
    for now_s in (100.0, 100.5, 4000.0, 4000.5):
        wait.look(now_s)
    assert wait.waited_s == 2.0
