"""What `doctor` says of groups that do not pool KV."""

from types import SimpleNamespace

from flying_serving.cli.model_check import Checked, findings
from flying_serving.worker.admission import KVPlan


def test_a_group_has_the_context_of_an_engine_where_latents_replicate() -> None:
    plan = KVPlan(blocks=21, block_bytes=2**20, block_tokens=32, max_model_len=1000)
    checked = Checked((1, 2), {}, layers=(6, 6), weight_bytes=1, lacking_bytes=-1, plan=plan)
    model = SimpleNamespace(
        architecture="X", use_mla=True, get_total_num_kv_heads=lambda: 8, runner_type="generate"
    )
    parallel = SimpleNamespace(tensor_parallel_size=1, data_parallel_size=2)
    config = SimpleNamespace(model_config=model, parallel_config=parallel)
    said = {row.what: row.reason for row in findings(config, checked, took_s=3.0)}
    assert said["group size 1"] == "ok, longest context 640 tokens (its KV holds 640)"
    assert said["group size 2"] == said["group size 1"]
