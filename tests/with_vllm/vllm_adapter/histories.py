"""Requests that come with a history, and the model that they come to."""

from types import SimpleNamespace
from typing import Any

from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.sample.logits_processor import LogitsProcessor

from flying_serving.vllm_adapter.keys import HISTORY_KEY

VOCAB = 97


def source(history: list[int] | None = None, **fields: Any) -> EngineCoreRequest:
    """Return what a client sends: five tokens of prompt, and the history."""
    regex = fields.pop("regex", None)
    params = SamplingParams(
        structured_outputs=StructuredOutputsParams(regex=regex) if regex else None,
        extra_args=None if history is None else {HISTORY_KEY: history},
        **fields,
    )
    return EngineCoreRequest("a", [1, 2, 3, 4, 5], None, params, None, 0.0, None, None, None)


def model(*processors: type[LogitsProcessor] | str, use_fp64_gumbel: bool = False) -> Any:
    """Return what is asked of a model's configuration; `processors`: of users."""
    return SimpleNamespace(
        use_fp64_gumbel=use_fp64_gumbel,
        logits_processors=list(processors) or None,
        hf_text_config=SimpleNamespace(),
    )
