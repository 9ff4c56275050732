"""`flying-serving bench`: replay a workload against a server and say how it did."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flying_serving.cli.admin import DEFAULT_URL, Key, Url, app

Model = Annotated[str | None, typer.Option(help="The model's name on the server; default: the first that it lists.")]
Trace = Annotated[
    Path | None,
    typer.Option(help="Trace to replay: Azure CSV, BurstGPT CSV, Mooncake JSONL, vLLM's timed trace, or our own file."),
]
TraceFormat = Annotated[
    str | None, typer.Option(help="azure, burstgpt, mooncake, timed_trace or flying; default: told by the content.")
]
SecMultiplier = Annotated[float, typer.Option(help="timed_trace: what a timestamp is multiplied by to get seconds.")]
HashBlock = Annotated[int, typer.Option(help="timed_trace: tokens that one hash id stands for.")]
Synth = Annotated[str | None, typer.Option(help="Make a workload instead: paper, poisson, gamma or alternating.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", help="Parameter of --synth, like rate_rps=5 or prompt_tokens=128:4000; may be repeated."),
]
Seed = Annotated[int, typer.Option(min=0, help="Of everything that is drawn.")]
Window = Annotated[str | None, typer.Option(help="START:END, seconds of the workload to replay.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Replay at most N requests.")]
TimeScale = Annotated[float, typer.Option(help="Scale inter-arrival times: 0.5 doubles the rate.")]
PromptScale = Annotated[float, typer.Option(help="Scale prompt lengths.")]
OutputScale = Annotated[float, typer.Option(help="Scale output lengths.")]
MaxPrompt = Annotated[int | None, typer.Option(min=1, help="Cut longer prompts to N tokens.")]
MaxOutput = Annotated[int | None, typer.Option(min=1, help="Cut longer outputs to N tokens.")]
PriorityShare = Annotated[float, typer.Option(help="Share of requests that get --priority.")]
Priority = Annotated[int, typer.Option(help="Their priority; lower is more urgent.")]
LongPrompts = Annotated[
    str | None, typer.Option(help="EVERY_S:PROMPT:OUTPUT, add one long request every EVERY_S seconds: 60:50000:100.")
]
SaveWorkload = Annotated[
    Path | None, typer.Option(help="Where the workload is saved; default: workload.jsonl in --out.")
]
SaveTimed = Annotated[Path | None, typer.Option(help="Save it for `vllm bench serve --dataset-name timed_trace` too.")]
Out = Annotated[Path | None, typer.Option(help="Directory for the results; default: bench-NAME-TIME.")]
SloText = Annotated[str | None, typer.Option("--slo", help="Limits in ms for the goodput, like ttft:2000,tpot:100.")]
Timeout = Annotated[float, typer.Option(min=0.1, help="A request that takes longer is unfinished.")]
TokenIds = Annotated[str, typer.Option(help="FIRST:LAST, token ids that prompts are made of.")]
PromptSeed = Annotated[int | None, typer.Option(min=0, help="Other prompts for the same workload; default: its seed.")]
ExtraBody = Annotated[str, typer.Option(help='JSON object to add to each request, like {"temperature": 0}.')]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Make and save the workload only.")]
Compare = Annotated[
    str | None,
    typer.Option(
        help="Start these servers in turn and compare them: static-dp, static-tp, auto, ..., stock-dp, stock-tp; "
        "their model and flags follow after --."
    ),
]
Server = Annotated[list[str] | None, typer.Argument(metavar="[-- MODEL FLAGS...]", help="Of servers to --compare.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")]


@app.command()
def bench(
    context: typer.Context,
    server: Server = None,
    compare: Compare = None,
    url: Url = DEFAULT_URL,
    api_key: Key = "",
    model: Model = None,
    trace: Trace = None,
    trace_format: TraceFormat = None,
    sec_multiplier: SecMultiplier = 1.0,
    hash_block_tokens: HashBlock = 16,
    synth: Synth = None,
    parameters: Set = None,
    seed: Seed = 0,
    window: Window = None,
    limit: Limit = None,
    time_scale: TimeScale = 1.0,
    prompt_scale: PromptScale = 1.0,
    output_scale: OutputScale = 1.0,
    max_prompt_tokens: MaxPrompt = None,
    max_output_tokens: MaxOutput = None,
    priority_share: PriorityShare = 0.0,
    priority: Priority = -1,
    long_prompts: LongPrompts = None,
    save_workload: SaveWorkload = None,
    save_timed_trace: SaveTimed = None,
    out: Out = None,
    slo: SloText = None,
    timeout_s: Timeout = 600.0,
    token_ids: TokenIds = "1000:29999",
    prompt_seed: PromptSeed = None,
    extra_body: ExtraBody = "{}",
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Replay a workload against an OpenAI-compatible server, without waiting for answers, and measure it."""
    from flying_serving.bench import command

    raise typer.Exit(command.main(context.params))
