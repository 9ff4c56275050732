"""The contents of emulated steps: what is computed, and which requests get a token."""

from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput

from flying_lab.emulation.step_contents import StepContents
from flying_lab.sim.requests import Chunk


def new(name: str, prompt: int, computed: int = 0) -> NewRequestData:
    return NewRequestData(name, [7] * prompt, [], None, None, ([1],), computed, None)


def plan(
    scheduled: dict[str, int],
    begun: list[NewRequestData] | None = None,
    computed: dict[str, int] | None = None,
    resumed: dict[str, list[int]] | None = None,
    ended: set[str] | None = None,
) -> SchedulerOutput:
    made = SchedulerOutput.make_empty()
    made.num_scheduled_tokens = scheduled
    made.scheduled_new_reqs = begun or []
    cached = made.scheduled_cached_reqs
    cached.req_ids = list(computed or {})
    cached.num_computed_tokens = list((computed or {}).values())
    cached.all_token_ids = resumed or {}
    made.finished_req_ids = ended or set()
    return made


def test_a_chunk_that_leaves_prompt_tokens_draws_no_token() -> None:
    contents = StepContents()
    first = plan({"a": 60}, [new("a", 100)])
    assert contents.take(first).chunks == [Chunk(60, 0)]
    assert contents.draw(first) == []


def test_the_last_chunk_of_a_prompt_draws_a_token() -> None:
    contents = StepContents()
    contents.take(plan({"a": 60}, [new("a", 100)]))
    last = plan({"a": 40}, computed={"a": 60})
    assert contents.take(last).chunks == [Chunk(40, 60)]
    assert contents.draw(last) == ["a"]


def test_a_decoding_request_reads_its_context() -> None:
    contents = StepContents()
    first = plan({"a": 100}, [new("a", 100)])
    contents.take(first)
    contents.draw(first)
    second = plan({"a": 1}, computed={"a": 100})
    step = contents.take(second)
    assert (step.sequences, step.decode_context_tokens, step.chunks) == (1, 100, [])
    assert contents.draw(second) == ["a"]


def test_a_resumed_request_is_computed_with_its_outputs() -> None:
    contents = StepContents()
    contents.take(plan({"a": 10}, [new("a", 10)]))
    part = plan({"a": 8}, computed={"a": 0}, resumed={"a": [7] * 14})
    contents.take(part)
    assert contents.draw(part) == []
    rest = plan({"a": 6}, computed={"a": 8})
    contents.take(rest)
    assert contents.draw(rest) == ["a"]


def test_an_ended_request_is_forgotten() -> None:
    contents = StepContents()
    contents.take(plan({"a": 10}, [new("a", 10)]))
    contents.take(plan({}, ended={"a"}))
    assert contents.known_tokens == {}
