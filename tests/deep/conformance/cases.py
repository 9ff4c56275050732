"""The table: which servers there are, and what each of them goes through.

Features that have nothing to do with each other share a row, so that each kind of model, of
engine and of setting is in one of few servers. A row that fails tells by its chapters which of its
features it is.
"""

from __future__ import annotations

import json

from harness import both_ways, experts_cpu, fp8_cpu, mxfp4_cpu, poison, triton_cpu
from harness.live import COMMAND
from harness.not_packed import not_packed
from harness.preambles import calling
from tests.deep.conformance.calls.speaker import NAME, write_speaker
from tests.deep.conformance.chapters import (
    adapters,
    clients,
    compiled,
    drafts,
    interpreted,
    lanes,
    lending,
    pooling,
    rounded,
)
from tests.deep.conformance.live import Case, Chapter, Job
from tests.stock.drafted import FLAG
from tests.stock.record import V2_TOKENS, WINDOW_TOKENS
from tests.stock.requests import FORCED, REQUESTS, shortened

MOST_STARTS = 20
JOBS = tuple(map(Job, REQUESTS))
FORCED_JOBS = tuple(map(Job, FORCED))
PLANS_AHEAD = "a step is planned while one is computed"
ASYNC = "--async-scheduling"
STAGED = "--cpu-collectives=staged"
COMPILED = "--no-enforce-eager"
OVERRIDES = json.dumps({"sliding_window": WINDOW_TOKENS})
FORCE_V2 = "--logits-processors=harness.force_v2:ForceTokens"
ARENA = "--worker-cls=tests.deep.server.arena_worker.ArenaWorker"
NOT_PACKED = calling(not_packed)
TWO_DEVICES = "an engine of two devices needs two GPUs"
CPU_ALONE = {
    lending.kv_goes_from_arena_to_arena: "memory of the host stands in for a device's",
    lanes.sharing_a_device_changes_nothing: "it is of the CPU's log",
}
"""Chapters that do not run on one GPU, and why not."""

WITH_STREAMS: tuple[Chapter, ...] = (lanes.together, lanes.switches, lanes.migrations)
WITH_LOSS: tuple[Chapter, ...] = (lanes.together, lanes.storm, lanes.migrations, lanes.loss)

DENSE = (
    Case(
        "llama-of-eight",
        "llama",
        8,
        (
            lanes.log,
            lanes.alone,
            *WITH_STREAMS,
            lanes.splits,
            lanes.kv_of_one_way_is_read_by_the_other,
            lanes.steps_divided_weights_and_tokens,
        ),
        jobs=JOBS,
        preamble=both_ways.PREAMBLE,
        quiet=(PLANS_AHEAD,),
    ),
    Case(
        "qwen3-that-speaks",
        "qwen3",
        4,
        (
            lanes.together,
            lanes.storm,
            lanes.migrations,
            lanes.splits,
            clients.calls_of_every_kind,
            clients.a_thought_that_is_cut_off,
            lanes.steps_divided_weights_and_tokens,
        ),
        jobs=JOBS,
        flags=clients.PARSERS,
        preamble=f"{poison.PREAMBLE}; {both_ways.PREAMBLE}",
        write=lambda model, scratch: write_speaker(model, scratch / NAME),
        served_name=NAME,
    ),
    Case(
        "qwen2-async-unpacked",
        "qwen2",
        4,
        (
            lanes.log,
            lanes.alone,
            *WITH_STREAMS,
            lanes.splits,
            lanes.steps_divided_weights_and_tokens,
        ),
        jobs=JOBS,
        flags=(ASYNC,),
        preamble=f"{both_ways.PREAMBLE}\n{NOT_PACKED}",
        says=(PLANS_AHEAD,),
    ),
    Case(
        "mqa-compiled-unpacked",
        "llama-mqa",
        2,
        (*WITH_STREAMS, compiled.each_engine_has_compiled),
        jobs=JOBS,
        flags=(COMPILED,),
        preamble=NOT_PACKED,
    ),
    Case(
        "llama-of-two-devices-async",
        "llama",
        2,
        (
            lanes.log,
            lanes.alone,
            *WITH_STREAMS,
            lanes.splits,
            lanes.steps_divided_weights_and_tokens,
        ),
        devices=2,
        jobs=JOBS,
        preamble=both_ways.PREAMBLE,
        flags=(ASYNC,),
        says=(PLANS_AHEAD,),
        cpu_only=TWO_DEVICES,
    ),
)
ROUNDED = (
    Case(
        "llama-bfloat16-v2",
        "llama",
        4,
        (
            lanes.log,
            lanes.all_degrees_are_offered,
            rounded.as_near_to_stock_as_stock_is_to_itself,
            rounded.as_near_through_a_loss,
            lanes.steps_divided_weights_and_tokens,
        ),
        jobs=FORCED_JOBS,
        record="llama-bfloat16",
        flags=("--dtype=bfloat16", FORCE_V2),
        without=("--dtype", "--logits-processors"),
        program=both_ways.COMMAND,
        environment=triton_cpu.ENVIRONMENT,
        says=("Using V2 Model Runner",),
        cpu_only="it compares with stock at degree 2, which needs two GPUs",
    ),
    Case(
        "llama-quantized",
        "llama-mixed",
        2,
        (lanes.all_degrees_are_offered, rounded.as_near_to_stock_as_stock_is_to_itself),
        jobs=FORCED_JOBS,
        record="llama-mixed-bfloat16",
        flags=("--dtype=bfloat16",),
        without=("--dtype",),
        environment={"VLLM_CPU_INT4_W4A8": "0"},  # lanes refuse that format
    ),
    Case(
        "llama-fp8-kernels-of-cuda",
        "llama-fp8-mixed",
        4,
        (
            lanes.all_degrees_are_offered,
            rounded.as_near_to_stock_as_stock_is_to_itself,
            rounded.as_near_through_a_loss,
        ),
        jobs=FORCED_JOBS,
        preamble=fp8_cpu.PREAMBLE,
        cpu_only="its products of FP8 are those for the CPU",
    ),
    Case(
        "mixtral-fp8-experts",
        "mixtral-fp8",
        4,
        (
            lanes.all_degrees_are_offered,
            rounded.as_near_to_stock_as_stock_is_to_itself,
            rounded.as_near_through_a_loss,
        ),
        jobs=FORCED_JOBS,
        flags=("--moe-backend=triton",),
        preamble=experts_cpu.PREAMBLE,
        cpu_only="its kernels of experts are for the CPU",
    ),
)
OTHER_LAYERS = (
    Case(
        "mixtral-windows-compiled-staged",
        "mixtral",
        2,
        (
            lanes.log,
            lanes.sharing_a_device_changes_nothing,
            *WITH_LOSS,
            compiled.each_engine_has_compiled,
            lanes.steps_divided_weights_and_tokens,
        ),
        jobs=JOBS,
        preamble=both_ways.PREAMBLE,
        record="mixtral-windows",
        flags=(f"--hf-overrides={OVERRIDES}", COMPILED, STAGED, "--engines-per-device=2"),
        says=("every layer has a window; KV of all tokens is kept",),
    ),
    Case(
        "gpt-oss-mxfp4-of-two-devices",
        "gpt-oss-mxfp4",
        2,
        (lanes.wider_groups_hold_more, *WITH_LOSS, lanes.steps_divided_weights_and_tokens),
        devices=2,
        jobs=JOBS,
        preamble=f"{mxfp4_cpu.PREAMBLE}; {both_ways.PREAMBLE}",
        cpu_only="its kernel of MXFP4 is one for the CPU",
    ),
    Case(
        "gemma4",
        "gemma4",
        4,
        (lanes.wider_groups_hold_more, *WITH_LOSS, lanes.steps_divided_weights_and_tokens),
        jobs=JOBS,
        preamble=f"{poison.PREAMBLE}; {both_ways.PREAMBLE}",
    ),
    Case(
        "deepseek-v3",
        "deepseek-v3",
        4,
        (lanes.wider_groups_hold_as_much, *WITH_LOSS),
        jobs=JOBS,
        preamble=poison.PREAMBLE,
        # the backend of the recording, also on processors with AMX
        flags=("--attention-backend=CPU_MLA",),
        cpu_only="its recording is of the CPU",
    ),
    Case(
        "falcon-h1",
        "falcon-h1",
        4,
        (lanes.log, lanes.together, lanes.storm, lanes.states_migrate, lanes.loss),
        jobs=JOBS,
        stock_degree=1,
        says=("--no-enable-prefix-caching: set",),
    ),
    Case(
        "pooling",
        "qwen3",
        2,
        (
            pooling.every_call,
            pooling.many_at_once,
            pooling.too_many_inputs_are_refused,
            pooling.groups_are_refused,
        ),
        flags=(
            "--policy=auto",
            "--runner=pooling",
            f"--max-waiting-requests={pooling.MOST_WAITING}",
        ),
        without=("--policy", "--logits"),
    ),
)
LENDING = (
    Case(
        "llama-lends",
        "llama",
        4,
        (
            lending.every_stage,
            lending.a_switch_waits_for_requests_that_need_the_room,
            lending.a_request_of_lower_degree_calls_weights_back,
            lending.narrower_groups_hold_what_they_ever_did,
            lending.weights_go_and_return_under_a_storm,
        ),
        jobs=JOBS,
        flags=lending.FLAGS,
    ),
    Case(
        "mixtral-lends-as-on-cuda",
        "mixtral",
        4,
        (
            lending.every_stage,
            lending.kv_goes_from_arena_to_arena,
            lending.a_switch_waits_for_requests_that_need_the_room,
            lending.a_request_of_lower_degree_calls_weights_back,
        ),
        jobs=JOBS,
        flags=(*lending.FLAGS, ARENA),
        cpu_only="its worker has memory of the host in place of a device's",
    ),
    Case(
        "mixtral-lends-v2",
        "mixtral",
        4,
        (
            lanes.log,
            lending.every_stage,
            lending.weights_return_while_requests_run,
            lanes.storm,
            lanes.migrations,
            lanes.splits,
            interpreted.state_of_a_sampler_follows_from_tokens,
            interpreted.members_draw_the_same_tokens,
        ),
        jobs=tuple(Job(shortened(request, V2_TOKENS)) for request in REQUESTS),
        record="mixtral-v2",
        flags=(*lending.FLAGS, FORCE_V2),
        without=("--logits-processors",),
        program=COMMAND,
        environment=triton_cpu.ENVIRONMENT,
        says=("Using V2 Model Runner",),
        cpu_only="it runs V2 in Triton's interpreter",
    ),
)
OF_REQUESTS = (
    Case(
        "llama-lora",
        "llama",
        2,
        (
            adapters.adapters_change_answers,
            adapters.models_are_listed,
            lanes.together,
            adapters.logprobs_of_a_prompt,
            lanes.storm,
            lanes.splits,
            lanes.loss,
            adapters.one_is_loaded_while_the_server_runs,
            adapters.another_version_is_no_answer,
            adapters.a_running_one_comes_to_an_engine_without_it,
            adapters.some_cannot_be_loaded,
        ),
        jobs=adapters.JOBS,
        preamble=poison.PREAMBLE,
        record="llama-lora",
        flags=adapters.FLAGS,
        write=adapters.write_adapters,
        environment={adapters.RUNTIME: "1"},
        cpu_only="LoRA is served on the CPU alone",
    ),
    Case(
        "llama-drafts",
        "llama",
        2,
        (
            drafts.drafts_are_accepted_and_rejected,
            drafts.answers_and_counts,
            drafts.parameters_of_sampling,
            drafts.switches_change_no_count,
            drafts.drafts_keep_to_a_grammar,
            lanes.splits,
            lanes.loss,
            lanes.steps_divided_weights_and_tokens,
        ),
        jobs=drafts.JOBS,
        preamble=both_ways.PREAMBLE,
        record="llama-ngram",
        flags=(FLAG,),
        without=("--logits-processors",),
        cpu_only="speculation is served on the CPU alone",
    ),
)
CASES = (*DENSE, *ROUNDED, *OTHER_LAYERS, *LENDING, *OF_REQUESTS)
