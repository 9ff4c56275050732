"""`serve --help`: a screen of our flags; `--help=WORD` is vLLM's, and finds our groups and flags
beside its own.
"""

from collections.abc import Callable
from typing import Any

import pytest
from vllm.utils.argparse_utils import FlexibleArgumentParser

from flying_serving.cli.serve import make_parser
from flying_serving.cli.serve_flags import flag_of, option
from flying_serving.config import GROUPS
from flying_serving.errors import ConfigError

Asked = Callable[[str], str]


@pytest.fixture(scope="module")
def parser() -> Any:
    return make_parser("flying-serving serve")


@pytest.fixture
def asked(
    parser: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Asked:
    """What a flag for help prints. vLLM's class keeps the word."""
    monkeypatch.setattr(FlexibleArgumentParser, "_search_keyword", None)
    monkeypatch.setenv("COLUMNS", "1000")

    def ask(flag: str) -> str:
        with pytest.raises(SystemExit) as ended:
            parser.parse_args(["model", flag])
        assert ended.value.code == 0
        return capsys.readouterr().out

    return ask


@pytest.mark.parametrize("flag", ["-h", "--help", "--hel"])
def test_help_without_a_word_is_the_screen(asked: Asked, parser: Any, flag: str) -> None:
    assert asked(flag) == parser._screen


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.title)
def test_group_of_ours_is_shown_in_full(asked: Asked, group: Any) -> None:
    shown = asked(f"--help={group.title}")
    assert shown.splitlines()[0] == f"{group.title}:"
    for name in group.fields:
        assert flag_of(name).text in shown
    others = {name for other in GROUPS for name in other.fields} - {*group.fields}
    assert not any(f"  {option(name)} " in shown for name in others)


def test_group_of_vllm_is_found_in_any_case(asked: Asked) -> None:
    shown = asked("--help=parallelconfig")
    assert shown.startswith("ParallelConfig:")
    assert "--data-parallel-size" in shown
    assert "--group-sizes" not in shown


def test_word_finds_flags_of_both(asked: Asked) -> None:
    shown = asked("--help=Policy")
    assert shown.startswith("Arguments matching 'policy':")
    assert "  --policy NAME " in shown
    assert "  --scheduling-policy " in shown
    assert "  --group-sizes " not in shown


def test_all_shows_our_groups_before_those_of_vllm(asked: Asked) -> None:
    lines = asked("--help=all").splitlines()
    assert lines[0] == "usage: flying-serving serve MODEL [OPTIONS]"
    titles = [line for line in lines if line.endswith(":") and not line.startswith(" ")]
    places = [titles.index(f"{name}:") for name in ("Layout", "Observability", "ModelConfig")]
    assert places == sorted(places)


def test_unknown_word_is_refused_with_every_group(asked: Asked, parser: Any) -> None:
    with pytest.raises(ConfigError) as refused:
        asked("--help=nonsense")
    said = str(refused.value)
    assert said.startswith("--help=nonsense: must be all, a part of a flag's name, or one of the ")
    assert said.endswith(", ".join(parser.groups()))
    assert {"Layout", "Losses", "Frontend", "ModelConfig", "ParallelConfig"} <= {*parser.groups()}


def test_every_word_that_is_named_as_a_group_finds_one(asked: Asked, parser: Any) -> None:
    for title in parser.groups():
        assert asked(f"--help={title}").startswith(f"{title}:")


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.title)
def test_no_group_of_ours_hides_flags_of_vllm(parser: Any, group: Any) -> None:
    """vLLM looks for a group first."""
    ours = {group.title for group in GROUPS}
    theirs = [
        flag
        for section in parser._action_groups
        if section.title not in ours
        for action in section._group_actions
        for flag in action.option_strings
    ]
    assert "--max-model-len" in theirs
    assert not [flag for flag in theirs if group.title.lower() in flag]
