"""A case of the table, the live server of a case, and what stock vLLM answers to its jobs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

from harness import lora
from harness.forked import ENVIRONMENT
from harness.live import FLAGS, Server, tiny
from harness.streams import WORST_LOGPROB, worst_difference
from tests.stock.drafted import DraftedRequest
from tests.stock.record import Answers
from tests.stock.recorded import answers_of
from tests.stock.requests import StockRequest

Groups = list[list[int]]
LAYOUTS: dict[int, tuple[Groups, ...]] = {
    2: ([[0, 1]], [[0], [1]]),
    4: ([[0, 1], [2, 3]], [[0, 1, 2, 3]], [[0], [1], [2, 3]], [[0], [1], [2], [3]]),
    8: (
        [[0, 1, 2, 3, 4, 5, 6, 7]],
        [[0, 1, 2, 3], [4, 5], [6], [7]],
        [[0, 1], [2, 3], [4, 5], [6, 7]],
        [[engine] for engine in range(8)],
    ),
}
"""By the number of engines; in the last one each engine is alone."""


ANSWER_S = 240.0
"""Many requests are asked at once, and the machine does other work too."""


@dataclass(frozen=True)
class Job:
    """A request that stock vLLM and a server both answer, with an adapter or without."""

    request: StockRequest | DraftedRequest
    adapter: str = lora.BASE

    @property
    def name(self) -> str:
        """Of the answer in the recording."""
        return lora.answer_name(self.request.name, self.adapter)

    @property
    def prompt(self) -> tuple[int, ...]:
        return self.request.prompt

    @property
    def max_tokens(self) -> int:
        return int(self.request.sampling()["max_tokens"])

    def lengthened(self, max_tokens: int) -> Job:
        """Return the same request with more tokens, of which stock's are the first."""
        return replace(self, request=replace(self.request, max_tokens=max_tokens))


class Answer(NamedTuple):
    """Tokens, and the logprob of each."""

    tokens: list[int]
    logprobs: list[float]


class Asked(NamedTuple):
    """A job, for a group of this degree or of any.

    `split_at`: where two engines share it. `like`: the degree of stock's answers that it is
    compared with, if not its own; that of any group is the smallest one's.
    """

    job: Job
    degree: int | None = None
    split_at: int | None = None
    like: int | None = None


@dataclass(frozen=True)
class Case:
    """A row of the table: a server, and the chapters that it goes through, in this order.

    Args:
        name: of the row.
        model: the shape of a tiny model.
        engines: how many.
        chapters: functions of the live server.
        devices: of each engine.
        jobs: what requests of most chapters are.
        record: the recording of stock vLLM's answers; by default that of the shape.
        stock_degree: of the answers with which all degrees are compared; by default each with its
            own.
        flags: of the server, beside FLAGS.
        without: FLAGS that begin so are left out.
        program: what runs as a process of its own; by default the server is forked.
        environment: more variables of the server.
        preamble: Python code that runs before a forked server.
        says: what its log says.
        quiet: what its log does not say.
        write: writes a variant of the tiny model to a folder.
        served_name: the name of the model in requests, if it is not its folder.
        cpu_only: why it does not run on one GPU, if it does not.
    """

    name: str
    model: str
    engines: int
    chapters: tuple[Chapter, ...]
    devices: int = 1
    jobs: tuple[Job, ...] = ()
    record: str = ""
    stock_degree: int | None = None
    flags: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    program: tuple[str, ...] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    preamble: str = ""
    says: tuple[str, ...] = ()
    quiet: tuple[str, ...] = ()
    write: Callable[[Path, Path], Path] | None = None
    served_name: str = ""
    cpu_only: str = ""

    @property
    def recording(self) -> str:
        """Name of the recording of stock vLLM's answers."""
        return self.record or self.model

    @property
    def degrees(self) -> tuple[int, ...]:
        """Tensor parallel degrees of its groups."""
        return tuple(d for d in (1, 2, 4, 8) if self.devices <= d <= self.devices * self.engines)

    def stock(self, degree: int) -> Answers:
        """Return what stock vLLM answers at a degree, by the name of the job."""
        return _stock(self.recording, self.stock_degree or degree)


_stock = cache(answers_of)


class Live(Server):
    """The live server of a case. `scratch`: a folder for what it needs."""

    def __init__(self, case: Case, scratch: Path) -> None:
        self.case = case
        self.degrees = case.degrees
        flags = case.flags
        if case.devices > 1:
            flags = (*flags, f"--tensor-parallel-size={case.devices}")
        model = tiny(case.model)
        super().__init__(
            case.write(model, scratch) if case.write else model,
            case.engines,
            *flags,
            base=[flag for flag in FLAGS if not flag.startswith(case.without)],
            program=case.program,
            preamble=case.preamble,
            environment={**ENVIRONMENT, **case.environment},
        )
        self.model = case.served_name or self.model
        self.http.timeout = ANSWER_S

    @property
    def layouts(self) -> tuple[Groups, ...]:
        """Some layouts; the last one has each engine alone."""
        return LAYOUTS[self.case.engines]

    @property
    def apart(self) -> Groups:
        """The layout in which each engine is alone."""
        return self.layouts[-1]

    def groups(self, degree: int) -> Groups:
        """Return the layout whose groups are all of this degree."""
        size = degree // self.case.devices
        engines = range(self.case.engines)
        return [list(engines[first : first + size]) for first in engines[::size]]

    def jobs(self, degree: int | None = None) -> list[Job]:
        """Return the jobs that a group of a degree has room for, by default any group."""
        capacity = self.capacity_tokens(degree or self.degrees[0])
        return [job for job in self.case.jobs if len(job.prompt) + job.max_tokens <= capacity]

    def capacity_tokens(self, degree: int) -> int:
        """Return how many tokens the KV cache of a group holds."""
        return int(self.status()["capacity_tokens"][str(degree // self.case.devices)])

    def ask(self, asked: Asked) -> None:
        """Ask a job, and compare its answer."""
        self.compare(asked, self.run(asked))

    def run(self, asked: Asked) -> Answer:
        """Ask a job."""
        job = asked.job
        sampling = job.request.sampling()
        extra = sampling.pop("extra_args", None) or {}
        wishes = {"tp_degree": asked.degree, "split_at": asked.split_at}
        extra |= {name: value for name, value in wishes.items() if value is not None}
        model = job.adapter or self.model
        choice = self.complete(job.prompt, model=model, vllm_xargs=extra, **sampling)
        return Answer(choice["token_ids"], choice["logprobs"]["token_logprobs"])

    def compare(self, asked: Asked, answer: Answer) -> None:
        """An answer is as long as asked for, and stock vLLM's as far as that one was recorded."""
        job, degree = asked.job, asked.like or asked.degree or self.degrees[0]
        stock = self.case.stock(degree)[job.name]
        count = min(len(stock["tokens"]), job.max_tokens)
        assert len(answer.tokens) == job.max_tokens, job.name
        assert answer.tokens[:count] == stock["tokens"][:count], f"{job.name} at degree {degree}"
        worst = worst_difference(answer.logprobs[:count], stock["logprobs"][:count])
        assert worst <= WORST_LOGPROB, f"{job.name} at degree {degree}: logprobs differ by {worst}"

    def answer_all(self, asked: Iterable[Asked]) -> None:
        """Ask all at once, and compare all answers."""
        with self.asking(list(asked)):
            pass

    @contextmanager
    def asking(self, asked: Sequence[Asked]) -> Iterator[Callable[[], bool]]:
        """Within this block jobs are asked, at its end all answers are compared.

        Yields a function that returns whether all are answered.
        """
        with ThreadPoolExecutor(len(asked)) as pool:
            answers = [pool.submit(self.ask, one) for one in asked]
            yield lambda: all(answer.done() for answer in answers)
            for answer in answers:
                answer.result()

    def migrations(self, what: str = "migrated") -> int:
        """Return a count of requests that have gone to another group, or of their tokens."""
        return sum(engine["migrations"][what] for engine in self.status()["engines"])


Chapter = Callable[[Live], None]
