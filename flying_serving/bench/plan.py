"""What `flying-serving bench` was asked for, checked, and the workload that follows from it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from flying_serving.bench.servers import SYSTEMS, Words, parse_words
from flying_serving.errors import ConfigError
from flying_serving.results.metrics import Slo, parse_slo
from flying_serving.workload import mixes, shape
from flying_serving.workload.model import MAX_TOKENS, Workload
from flying_serving.workload.read import Format, TraceOptions, read_workload
from flying_serving.workload.synth import parse_synthesis, synthesise


def _numbers(form: str, *kinds: Callable[[str], float]) -> Callable[[Any], Any]:
    """A validator for numbers with colons between, as many as kinds."""

    def parse(value: Any) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return tuple(kind(part) for kind, part in zip(kinds, value.split(":"), strict=True))
        except ValueError:
            raise ValueError(f"{form} is expected") from None

    return parse


def _object(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise ValueError(f"a JSON object is expected ({error})") from None


def _several(pair: tuple[int, int]) -> tuple[int, int]:
    if pair[0] >= pair[1]:
        raise ValueError("at least two token ids are expected, FIRST below LAST")
    return pair


def _systems(value: Any) -> Any:
    if not isinstance(value, str):
        return value or ()
    names = tuple(name.strip() for name in value.split(","))
    if len(set(names)) < len(names) or not set(names) <= set(SYSTEMS):
        raise ValueError(f"names with commas between, each once, of {', '.join(SYSTEMS)}")
    return names


def _words(value: Any) -> Any:
    return parse_words(value) if isinstance(value, list | tuple) and value else None


Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Tokens = Annotated[int, Field(ge=1, le=MAX_TOKENS)]
TokenId = Annotated[int, Field(ge=0, le=2**31)]


class Plan(BaseModel):
    """Options of `flying-serving bench`, by the names of the command line."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str
    api_key: str = Field(default="", repr=False)
    model: str | None = None
    trace: Path | None = None
    trace_format: Format | None = None
    sec_multiplier: Positive = 1.0
    hash_block_tokens: Tokens = 16
    synth: str | None = None
    parameters: list[str] | None = None
    seed: int = Field(default=0, ge=0)
    window: Annotated[tuple[float, float], BeforeValidator(_numbers("START:END", float, float))] | None = None
    limit: int | None = Field(default=None, ge=1)
    time_scale: Positive = 1.0
    prompt_scale: Positive = 1.0
    output_scale: Positive = 1.0
    max_prompt_tokens: Tokens | None = None
    max_output_tokens: Tokens | None = None
    priority_share: float = Field(default=0.0, ge=0, le=1)
    priority: int = -1
    long_prompts: (
        Annotated[tuple[Positive, Tokens, Tokens], BeforeValidator(_numbers("EVERY_S:PROMPT:OUTPUT", float, int, int))]
        | None
    ) = None
    save_workload: Path | None = None
    save_timed_trace: Path | None = None
    out: Path | None = None
    slo: Annotated[Slo, BeforeValidator(lambda value: parse_slo(value) if isinstance(value, str) else value)] | None = (
        None
    )
    timeout_s: Positive = 600.0
    token_ids: Annotated[
        tuple[TokenId, TokenId], BeforeValidator(_numbers("FIRST:LAST", int, int)), AfterValidator(_several)
    ] = (1000, 29999)
    prompt_seed: int | None = Field(default=None, ge=0)
    extra_body: Annotated[dict[str, Any], BeforeValidator(_object)] = Field(default_factory=dict)
    dry_run: bool = False
    as_json: bool = False
    compare: Annotated[tuple[str, ...], BeforeValidator(_systems)] = ()
    server: Annotated[Words | None, BeforeValidator(_words)] = None

    @model_validator(mode="after")
    def _servers(self) -> Plan:
        if self.compare and self.server is None:
            raise ValueError("--compare needs the servers' model and flags behind a --: -- MODEL [FLAGS]")
        if self.server is not None and not self.compare:
            raise ValueError(f"-- {self.server.model}: only --compare starts servers")
        return self


def parse_plan(options: Mapping[str, Any]) -> Plan:
    """Options, checked.

    Raises:
        ConfigError: naming the flag, its value and what is allowed.
    """
    try:
        return Plan.model_validate(dict(options))
    except ValidationError as error:
        problem = error.errors()[0]
        message = problem["msg"].removeprefix("Value error, ")
        if not problem["loc"] or problem["loc"][0] == "server":
            raise ConfigError(message) from None
        name = str(problem["loc"][0])
        flag = "--" + name.replace("_", "-")
        raise ConfigError(message if message.startswith(flag) else f"{flag}={options[name]!r}: {message}") from None


def workload_of(plan: Plan) -> Workload:
    """Read or make the workload; cut, scale, clip and mix it, in this order.

    Raises:
        ConfigError: if there is none or too much to make it from.
        WorkloadError: naming what is wrong with the trace or a parameter.
    """
    workload = _source(plan)
    if plan.window is not None:
        workload = shape.window(workload, *plan.window)
    if plan.limit is not None:
        workload = shape.first(workload, plan.limit)
    workload = shape.scale_time(workload, plan.time_scale)
    workload = shape.scale_lengths(workload, plan.prompt_scale, plan.output_scale)
    workload = shape.clip(workload, plan.max_prompt_tokens or MAX_TOKENS, plan.max_output_tokens or MAX_TOKENS)
    if plan.priority_share:
        workload = mixes.with_priority(workload, plan.priority_share, plan.priority, seed=plan.seed)
    if plan.long_prompts is not None:
        every_s, prompt, output = plan.long_prompts
        workload = mixes.with_long_prompts(workload, prompt, output, every_s, seed=plan.seed)
    return workload


def _source(plan: Plan) -> Workload:
    """The workload before anything is done to it."""
    if (plan.trace is None) == (plan.synth is None):
        raise ConfigError("--trace FILE or --synth KIND: one of them is needed, and not both")
    if plan.trace is not None:
        if plan.parameters:
            raise ConfigError(f"--set={plan.parameters[0]!r}: only --synth has parameters")
        whole = plan.limit if plan.window is None else None  # a window is cut first, so all of the file is read
        options = TraceOptions(
            format=plan.trace_format,
            limit=whole,
            sec_multiplier=plan.sec_multiplier,
            block_tokens=plan.hash_block_tokens,
        )
        return read_workload(plan.trace, plan.seed, options)
    return synthesise(parse_synthesis(str(plan.synth), _parameters(plan.parameters or [])), plan.seed)


def _parameters(given: list[str]) -> dict[str, Any]:
    """`name=value` and `name=low:high` by name."""
    found: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or name in found:
            raise ConfigError(f"--set={text!r}: NAME=VALUE or NAME=LOW:HIGH is expected, each name once")
        found[name] = tuple(value.split(":")) if ":" in value else value
    return found
