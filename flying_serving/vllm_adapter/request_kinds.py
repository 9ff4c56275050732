"""Kinds of requests that a server serves only if it is asked to: where the rest of an engine meets
them. Each kind has a package of its own.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from flying_serving.vllm_adapter.lora.layers import made_up_adapter, take_over
from flying_serving.vllm_adapter.lora.scheduler import AdapterScheduler
from flying_serving.vllm_adapter.scheduler.history import Note, nothing_to_note
from flying_serving.vllm_adapter.speculation.drafts import Drafter, take_drafts
from flying_serving.vllm_adapter.speculation.scheduler import DraftingScheduler


def scheduler_kinds(config: Any) -> tuple[type[Any], ...]:
    """Return the classes between a LaneScheduler and vLLM's that the requests of a VllmConfig
    need.
    """
    asked = {DraftingScheduler: config.speculative_config, AdapterScheduler: config.lora_config}
    return tuple(kind for kind, settings in asked.items() if settings is not None)


def note_of_kinds(config: Any) -> Note:
    """Return the function that notes what a request with a history needs, with this VllmConfig."""
    return nothing_to_note if config.speculative_config is None else Drafter(config).note_generator


def post_step(scheduler: Any, call_lane: Callable[..., Any], size: int) -> None:
    """Take what the workers of a group of `size` engines have for its next step beside an output,
    as vLLM's `EngineCore.post_step` does.
    """
    if scheduler.num_spec_tokens > 0 and (drafts := call_lane(size, take_drafts)) is not None:
        scheduler.update_draft_token_ids(drafts)


def adapt_runner(runner: Any, run_dir: str, engine: int) -> None:
    """Let vLLM's runner of lane 1, whose model is loaded, serve all kinds of its requests in an
    engine of a server.
    """
    if runner.lora_config is not None:
        take_over(runner, run_dir, engine)


def made_up_variant(runner: Any) -> AbstractContextManager[Any]:
    """While the body runs, vLLM's runner of lane 1 has a variant of the model with random numbers.
    Gives what `check_steps` takes for it; None if no variants are served.
    """
    return made_up_adapter(runner)
