"""The rows of doctor's table for a model."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from flying_serving.cli.checks import Finding
from flying_serving.cli.model_check import Checked, findings
from flying_serving.memory.kv_groups import KVGroup, KVGroups, one_group
from flying_serving.worker.weightless_model import KVPlan


def checked_of(**changes: Any) -> Checked:
    plan = KVPlan(blocks=21, block_bytes=2**20, groups=one_group(32), max_model_len=1000)
    refused = {4: "6 attention heads do not divide by 4"}
    checked = Checked(
        (1, 2),
        refused,
        layers=(6, 6),
        experts=(0, 0),
        weight_bytes=2**30,
        lacking_bytes=-1,
        plan=plan,
    )
    return replace(checked, **changes)


def configured_as(*, use_mla: bool) -> SimpleNamespace:
    """vLLM's configuration of two engines, of a model with four KV heads."""
    return SimpleNamespace(
        model_config=SimpleNamespace(
            architecture="X",
            use_mla=use_mla,
            get_total_num_kv_heads=lambda: 4,
            model_arch_config=SimpleNamespace(per_layer_overrides=None),
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, data_parallel_size=2),
    )


def test_the_table_pools_kv_in_groups() -> None:
    """A block of a group holds twice the tokens, and a request no more than the model takes."""
    config = configured_as(use_mla=False)
    rows = [(row.state, row.what, row.reason) for row in findings(config, checked_of(), took_s=3.0)]
    assert rows == [
        ("ok", "X", "checked in 3 s"),
        ("ok", "weights", "1.00 GiB on each device"),
        ("ok", "KV cache", "0.02 GiB on each device, 21 blocks"),
        ("ok", "group size 1", "ok, longest context 640 tokens (its KV holds 640)"),
        ("ok", "group size 2", "ok, longest context 1000 tokens (its KV holds 1280)"),
        ("warn", "group size 4", "not offered: 6 attention heads do not divide by 4"),
    ]


def test_a_group_with_less_than_the_models_length_has_room_for_a_step() -> None:
    plan = replace(checked_of().plan, step_tokens=5)
    rows = findings(configured_as(use_mla=False), checked_of(plan=plan), took_s=3.0)
    said = {row.what: row.reason for row in rows}
    assert said["group size 1"] == "ok, longest context 636 tokens (its KV holds 640)"
    assert said["group size 2"] == "ok, longest context 1000 tokens (its KV holds 1280)"


def test_a_group_has_the_context_of_an_engine_where_latents_replicate() -> None:
    rows = findings(configured_as(use_mla=True), checked_of(), took_s=3.0)
    said = {row.what: row.reason for row in rows}
    assert said["group size 1"] == "ok, longest context 640 tokens (its KV holds 640)"
    assert said["group size 2"] == said["group size 1"]


def test_a_state_of_each_request_limits_how_many_there_are() -> None:
    """Five requests have three blocks each for their states, and one for KV; 20 blocks can be
    used.
    """
    state = KVGroup(1000, has_state=True)
    groups = KVGroups((state, KVGroup(32), state, state))
    plan = replace(checked_of().plan, groups=groups)
    rows = findings(configured_as(use_mla=False), checked_of(plan=plan), took_s=3.0)
    said = {row.what: row.reason for row in rows}
    assert said["KV cache"].endswith(
        "21 blocks; a request has 3 for its state, and at least one for its KV: at most 5 requests "
        "at a time in a group"
    )
    assert said["group size 1"] == "ok, longest context 544 tokens (its KV holds 544)"


def test_weights_that_do_not_fit_have_a_row_that_says_how_much_is_missing() -> None:
    rows = findings(configured_as(use_mla=False), checked_of(lacking_bytes=3 * 2**30), took_s=1.0)
    weights = next(row for row in rows if row.what == "weights")
    says = "1.00 GiB on each device, for 2 of them 3.00 GiB more than this machine has free"
    assert weights == Finding("bad", "weights", says)
