"""Models that a worker refuses once it knows their layers."""

from flying_serving.errors import Unsupported
from flying_serving.vllm_adapter.model_runner.device_lane import DeviceLane


def refuse_without_kv(lane1: DeviceLane) -> None:
    """Raise Unsupported if no layer keeps KV, as in BERT, whose tokens see later ones: requests are
    counted by their KV.
    """
    if not lane1.kv.specs():
        raise _of(lane1, "models without KV")


def refuse_not_causal(lane1: DeviceLane) -> None:
    """Raise Unsupported if prompt tokens see later ones: outputs of a migrated request are computed
    as its prompt.

    vLLM serves such models without chunked prefill, and never schedules a prompt that is longer
    than a step. To be called before memory is allocated for KV.
    """
    if any(getattr(spec, "non_causal", False) for spec in lane1.kv.specs().values()):
        raise _of(lane1, "models with attention that is not causal")


def _of(lane1: DeviceLane, kind: str) -> Unsupported:
    architecture = lane1.config.model_config.architecture
    return Unsupported(f"--model: {kind} ({architecture}) cannot be served by Flying Serving yet")
