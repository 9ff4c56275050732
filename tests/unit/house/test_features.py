"""Which names and strings make a file know a feature."""

import ast

import pytest

from house.features import features, files_of, knows, names_of
from house.source import Module


def names(source: str, path: str = "flying_serving/room/file.py") -> str:
    """The names of a file with this source."""
    return names_of(Module("file", path, ast.parse(source)))


@pytest.mark.parametrize(
    "source",
    [
        "from peft import LoRAModel",
        "import peft.lora",
        "def f(max_lora): pass",
        "class BaseWithLoRA: pass",
        "f(lora=1)",
        "one.lora_name",
        "one = 'a message on LoRA'",
        "one = f'{two} of LoRA'",
        "import peft as lora",
    ],
)
def test_name_or_string_with_a_word_is_known(source: str) -> None:
    assert knows(names(source), "lora")


@pytest.mark.parametrize(
    "source",
    ['"""On LoRA."""', 'def f():\n    """On LoRA."""', "one = 1  # LoRA", "exploration = 1"],
)
def test_docstring_comment_or_end_of_a_word_is_not_known(source: str) -> None:
    assert not knows(names(source), "lora")


def test_a_file_knows_the_feature_that_it_is_named_after() -> None:
    assert knows(names("", "flying_serving/room/lora.py"), "lora")


def test_parts_of_a_class_name_are_apart() -> None:
    assert knows(names("class StateCut: pass"), "state_cut")
    assert knows(names("Int8Tokens"), "int8_")


def test_files_of_a_feature_have_one_of_its_words() -> None:
    texts = {"a": names("draft"), "b": names("ngram"), "c": names("token")}
    assert files_of(["draft", "ngram"], texts) == ["a", "b"]


def test_adapters_of_vllm_in_general_are_no_lora() -> None:
    text = names("from flying_serving.vllm_adapter import kv")
    assert not files_of(features()["LoRA"], {"a": text})
