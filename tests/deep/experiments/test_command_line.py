"""The command line of `python -m experiments`."""

import pytest

from experiments.__main__ import ALL, options


def test_help_prints_the_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        options(["--help"])
    assert ended.value.code == 0
    assert "usage: python -m experiments" in capsys.readouterr().out


def test_names_and_pages_are_read() -> None:
    assert options([]).names == []
    assert options(["oracle", "gyges"]).names == ["oracle", "gyges"]
    assert options(["--pages"]).pages


def test_unknown_name_is_an_error_with_all_names(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        options(["fig10"])
    assert ended.value.code == 2
    assert f"fig10: not one of {', '.join(ALL)}" in capsys.readouterr().err


def test_pages_alone_take_no_names() -> None:
    with pytest.raises(SystemExit):
        options(["oracle", "--pages"])
