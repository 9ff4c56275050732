"""Flags of `serve`: one for each setting, over what --additional-config says; what is wrong names
the flag.
"""

import errno
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest
from pydantic import BaseModel, Field, ValidationError, model_validator

from flying_serving.cli.serve import explain_mistakes
from flying_serving.config import KEY, FlyingConfig
from flying_serving.errors import ConfigError, Unsupported
from tests.with_vllm.cli.flag_settings import settings


def test_flags_are_read_as_the_type_of_their_setting() -> None:
    assert settings() == FlyingConfig().model_dump()
    given = settings(
        "--weave-steps=3", "--max-pause-ms", "2.5", "--group-sizes", "1,4", "--cpu-collectives=gloo"
    )
    assert given["weave_steps"] == 3
    assert given["max_pause_ms"] == 2.5
    assert given["group_sizes"] == (1, 4)
    assert given["cpu_collectives"] == "gloo"
    assert settings("--lend-weights")["lend_weights"] is True
    assert (
        settings("--no-lend-weights", additional={KEY: {"lend_weights": True}})["lend_weights"]
        is False
    )


def test_a_flag_overrides_additional_config_and_its_default_does_not() -> None:
    """`{"flying_serving": {...}}` beside other plugins' keys."""
    additional = {KEY: {"weave_steps": 7, "lend_blocks": 9}, "other": 1}
    given = settings("--lend-blocks", "3", additional=additional)
    assert given["weave_steps"] == 7
    assert given["lend_blocks"] == 3


@pytest.mark.parametrize(
    ("argv", "additional", "says"),
    [
        (["--weave-steps=0"], None, "--weave-steps=0: must be a whole number from 1 up to 1000"),
        (["--max-pause-ms=-1"], None, "--max-pause-ms=-1: must be a number from 1 up to 3600000"),
        (["--group-sizes=1,,2"], None, "--group-sizes=1,,2: '' must be a whole number"),
        (
            ["--weave-steps=2"],
            {KEY: {"lend_blocks": 0}},
            "--additional-config flying_serving.lend_blocks=0: must be a",
        ),
        ([], {KEY: [1]}, "--additional-config flying_serving=[1]: must be a JSON object"),
        ([], [1], "--additional-config=[1]: must be a JSON object"),
    ],
)
def test_wrong_setting_is_named_as_it_was_given(
    argv: list[str], additional: Any, says: str
) -> None:
    """The flag if there was one, and the value as it was typed."""
    with pytest.raises(ConfigError) as refused:
        settings(*argv, additional=additional)
    assert str(refused.value).startswith(says)


class ModelConfig(BaseModel):
    """As vLLM's, which finds most of a user's mistakes."""

    max_model_len: int = Field(le=10)


class VllmConfig(BaseModel):
    """As vLLM's, for a model with recurrent state on a CPU without prefix caching."""

    @model_validator(mode="after")
    def refuse(self) -> Self:
        raise ValueError("--mamba-block-size can only be set with --enable-prefix-caching")


ARGS = SimpleNamespace(model="m", host=None, port=80)


def start(args: SimpleNamespace, error: BaseException) -> None:
    """A server that ends with an error."""
    with explain_mistakes(args):
        raise error


@pytest.mark.parametrize(
    "error",
    [
        ValueError("No tokenizer registered"),
        KeyError("x"),
        TypeError("x"),
        OSError(errno.ENOSPC, "x"),
    ],
    ids=repr,
)
def test_any_other_error_of_vllm_keeps_its_traceback(error: Exception) -> None:
    with pytest.raises(type(error)) as raised:
        start(ARGS, error)
    assert raised.value is error


def test_an_error_of_the_hub_names_a_model_that_is_not_there(tmp_path: Path) -> None:
    error = OSError("Not there\nCheck your connection")
    with pytest.raises(
        ConfigError, match=r"^--model=m: .* no model of that name is available: Not there$"
    ):
        start(ARGS, error)
    with pytest.raises(OSError, match="Not there") as raised:
        start(SimpleNamespace(**{**vars(ARGS), "model": str(tmp_path)}), error)
    assert raised.value is error


def test_a_flag_that_vllm_has_set_for_recurrent_state_is_explained() -> None:
    with pytest.raises(ValidationError) as wrong:
        VllmConfig()
    with pytest.raises(Unsupported, match=r"^--model: vLLM turns prefix caching off"):
        start(SimpleNamespace(**vars(ARGS), mamba_block_size=None), wrong.value)


def test_the_same_flag_of_a_user_is_refused_in_vllms_words() -> None:
    with pytest.raises(ValidationError) as wrong:
        VllmConfig()
    with pytest.raises(ConfigError, match=r"^--mamba-block-size can only be set with "):
        start(SimpleNamespace(**vars(ARGS), mamba_block_size=32), wrong.value)


def test_refusal_by_vllm_is_one_line() -> None:
    """No traceback of its configuration; a port in use too; and an interrupt is the user's wish."""
    args = ARGS
    with pytest.raises(ValidationError) as wrong:
        ModelConfig(max_model_len=11)
    with pytest.raises(
        ConfigError, match=r"^--max-model-len=11: Input should be less than or equal to 10$"
    ):
        start(args, wrong.value)
    with pytest.raises(ConfigError, match=r"--port=80: address already in use"):
        start(args, OSError(errno.EADDRINUSE, "x"))
    for interrupt, code in ((KeyboardInterrupt("terminated"), 143), (KeyboardInterrupt(), 130)):
        with pytest.raises(SystemExit) as ended:
            start(args, interrupt)
        assert ended.value.code == code
