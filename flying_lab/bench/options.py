"""Options of `flying-serving bench` and of the workload that it and `simulate` run. Importing this
imports no numpy.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from flying_lab.bench.servers import SYSTEMS
from flying_lab.workload.model import MAX_TOKENS, Format
from flying_serving.errors import ConfigError
from flying_serving.slo import Slo, parse_slo


def _parsed(parse: Callable[[str], Any]) -> BeforeValidator:
    """Parse a value if it is text."""
    return BeforeValidator(lambda value: parse(value) if isinstance(value, str) else value)


def _numbers(form: str, *kinds: Callable[[str], float]) -> BeforeValidator:
    """Parse numbers with colons between them, one of each kind."""

    def parse(text: str) -> tuple[float, ...]:
        try:
            return tuple(kind(part) for kind, part in zip(kinds, text.split(":"), strict=True))
        except ValueError:
            raise ValueError(f"{form} is expected") from None

    return _parsed(parse)


def _object(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"a JSON object is expected ({error})") from None


def _several(pair: tuple[int, int]) -> tuple[int, int]:
    if pair[0] >= pair[1]:
        raise ValueError("at least two token ids are expected, FIRST below LAST")
    return pair


def _systems(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if len(set(names)) < len(names) or not set(names) <= set(SYSTEMS):
        raise ValueError(f"names with commas between, each once, of {', '.join(SYSTEMS)}")
    return names


Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Tokens = Annotated[int, Field(ge=1, le=MAX_TOKENS)]
TokenId = Annotated[int, Field(ge=0, le=2**31)]
SloOption = Annotated[
    Slo | None,
    _parsed(parse_slo),
    Field(description="Limits in ms for the goodput, like ttft:2000,tpot:100."),
]
AsJson = Annotated[bool, Field(description="Print the summary as JSON.")]


def make_out(out: Path) -> None:
    """Make the directory of --out."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out={str(out)!r}: {error.strerror}") from None


class WorkloadOptions(BaseModel):
    """The source of a workload, and how it is cut, scaled and mixed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    trace: Path | None = Field(
        default=None,
        description="Trace to replay: Azure CSV, BurstGPT CSV, Mooncake JSONL, vLLM's timed trace, "
        "or our own file.",
    )
    trace_format: Format | None = Field(
        default=None,
        description="azure, burstgpt, mooncake, timed_trace or flying; default: detected from the "
        "content.",
    )
    sec_multiplier: Positive = Field(
        default=1.0, description="timed_trace: seconds per unit of a timestamp."
    )
    hash_block_tokens: Tokens = Field(default=16, description="timed_trace: tokens per hash id.")
    synth: str | None = Field(
        default=None, description="Make a workload instead: paper, poisson, gamma or alternating."
    )
    parameters: list[str] = Field(
        default=[],
        description="Parameter of --synth, like rate_rps=5 or prompt_tokens=128:4000; may be "
        "repeated.",
    )
    seed: int = Field(default=0, ge=0, description="Seed of all random draws.")
    window: Annotated[tuple[float, float] | None, _numbers("START:END", float, float)] = Field(
        default=None, description="START:END, seconds of the workload to replay."
    )
    limit: int | None = Field(default=None, ge=1, description="Replay at most N requests.")
    time_scale: Positive = Field(
        default=1.0, description="Scale inter-arrival times: 0.5 doubles the rate."
    )
    prompt_scale: Positive = Field(default=1.0, description="Scale prompt lengths.")
    output_scale: Positive = Field(default=1.0, description="Scale output lengths.")
    max_prompt_tokens: int | None = Field(
        default=None, ge=1, le=MAX_TOKENS, description="Cut longer prompts to N tokens."
    )
    max_output_tokens: int | None = Field(
        default=None, ge=1, le=MAX_TOKENS, description="Cut longer outputs to N tokens."
    )
    priority_share: float = Field(
        default=0.0, ge=0, le=1, description="Share of requests that get --priority."
    )
    priority: int = Field(default=-1, description="Priority of these requests; lower goes first.")
    long_prompts: Annotated[
        tuple[Positive, Tokens, Tokens] | None, _numbers("EVERY_S:PROMPT:OUTPUT", float, int, int)
    ] = Field(
        default=None,
        description="EVERY_S:PROMPT:OUTPUT, add one long request every EVERY_S seconds: "
        "60:50000:100.",
    )


class BenchOptions(BaseModel):
    """The servers that `flying-serving bench` measures, the form of the replay, and its output."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    compare: Annotated[tuple[str, ...], _parsed(_systems)] = Field(
        default=(),
        description="Start these servers one after the other and compare them: static-dp, "
        "static-tp, "
        "auto, ..., "
        "stock-dp, stock-tp; their model and flags follow after --.",
    )
    url: str = Field(default="http://127.0.0.1:8000", description="URL of the server.")
    api_key: str = Field(default="", repr=False, description="The server's API key.")
    model: str | None = Field(
        default=None,
        description="The model's name on the server; default: the first that it lists.",
    )
    save_workload: Path | None = Field(
        default=None, description="File for the workload; default: workload.jsonl in --out."
    )
    save_timed_trace: Path | None = Field(
        default=None, description="Also save it for `vllm bench serve --dataset-name timed_trace`."
    )
    out: Path | None = Field(
        default=None, description="Directory for the results; default: bench-NAME-TIME."
    )
    slo: SloOption = None
    timeout_s: float = Field(
        default=600.0,
        ge=0.1,
        allow_inf_nan=False,
        description="A request that takes longer is unfinished.",
    )
    token_ids: Annotated[
        tuple[TokenId, TokenId], _numbers("FIRST:LAST", int, int), AfterValidator(_several)
    ] = Field(
        default=(1000, 29999), description="FIRST:LAST, token ids of prompts; default: 1000:29999."
    )
    prompt_seed: int | None = Field(
        default=None, ge=0, description="Seed of the prompts' tokens; default: the workload's seed."
    )
    extra_body: Annotated[dict[str, Any], _parsed(_object)] = Field(
        default={}, description='JSON object to add to each request, like {"temperature": 0}.'
    )
    dry_run: bool = Field(default=False, description="Make and save the workload only.")
    as_json: AsJson = False

    @property
    def vocabulary(self) -> range:
        """The token ids of prompts."""
        first, last = self.token_ids
        return range(first, last + 1)
