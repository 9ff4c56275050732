"""One word for each thing in names, the field's where it has one; plain sentences in docstrings.

Earlier words for a thing, and clauses that a reader has to read twice, do not come back.
"""

import ast
import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, TypeGuard

import pytest

LIST = Path(__file__)
ROOT = LIST.parent.parent
FOLDERS = ("flying_serving", "flying_lab", "harness", "tests", "benchmarks", "experiments", "zoo")
USE: dict[str, str] = {
    "ticket": "step or message, of an ordered channel with sequence numbers",
    "turn turns": "lane arbiter, time slice",
    "still": "hold",
    "park parks parked": "retain",
    "move moves moved moving mover movers movable": "migrate, migration",
    "exchange exchanges exchanged exchanging transfer": "migrate, pull",
    "meet meets met": "satisfy, share",
    "come comes came coming": "arrive",
    "let_go lets_go": "release",
    "cover covers": "enclosing group",
    "led": "lane, leads",
    "wanted tracked": "RequestSpec, RequestState",
    "withdraw withdrawn": "recall",
    "outgrew outgrow outgrows outgrown": "exceeds the group's KV",
    "slots": "max_num_seqs",
    "budget_tokens": "max_num_batched_tokens",
    "hindrance outlook": "interference, forecast",
    "judge judged judges": "evaluate",
    "rolled": "fluid model",
    "catch catches catching": "migrate stragglers",
    "stays late": "straggler, overdue",
    "seat seats": "endpoint",
    "plant plants planted": "injected fault",
    "wording": "validation, ServerArgs",
    "whoever whom": "the thing by its name",
}
"""Words that no name may have, and what is said instead."""
IN_SENTENCES = {"turn", "turns", "still", "meet", "meets", "met", "come", "comes", "came", "coming"}
IN_SENTENCES |= {"stays", "late", "covers"}
"""Of these, what a test's name may say: it is a sentence."""
EXEMPT = {
    "__slots__": "Python's",
    "allocate_slots": "vLLM's KVCacheManager",
    "bad_words": "a field of vLLM's requests",
    "kv_transfer_params": "a field of vLLM's requests",
    "ec_transfer_params": "a field of vLLM's requests",
    "--kv-transfer-config": "a flag of vLLM",
    "--ec-transfer-config": "a flag of vLLM",
    "transfer.py": "the copy of KV, as in plan, protocol, transfer",
    "test_transfer.py": "its tests",
}
"""Names that stay, and why."""
FLAG_OR_METRIC = re.compile(r"--[a-z][a-z-]*=?|flying:[a-z_]+")
PROSE = ("flying_serving/**/*.py", "flying_lab/**/*.py")
"""Files whose docstrings follow the rule of prose, as patterns below the root."""
MOST_WORDS = 25
"""Words of a sentence. Code in backticks is one word."""
SAY: dict[str, str] = {
    r"^Whether\b": "Return whether, or True if",
    r"(^|[;:,] )[Ww]hat\b(?! (an?|the)\b)": "the thing by its name, not a clause with what",
    r"\b([Tt]hose|[Tt]hey|[Tt]hem) (that|who|whom|whose|which)\b": "the things by their name",
    r"\b[Ee]lse\b": "otherwise, other, or no other",
    r"\b[Ss]o (many|much|long)\b(?! that\b)": "the number or the duration by its name",
    r"\b[Nn]obody\b": "no request, no engine, no client",
    r"\b([Ww]hoever|[Ww]homever|[Ww]hom)\b": "the thing by its name",
}
"""Words that no sentence of a docstring may have, and what is said instead."""
EXEMPT_SENTENCES: dict[str, str] = {}
"""Sentences that stay, by their first words, and why."""
BANNED = {
    tuple(word.split("_")): instead for words, instead in USE.items() for word in words.split()
}


def _words(name: str) -> tuple[str, ...]:
    """The words of `a_name`, `AName`, `--a-flag` or `a:metric`, in lower case."""
    return tuple(re.findall(r"[a-z0-9]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()))


def _made_here(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, name) of everything that a file gives a name to: fields, keys of JSON, flags and
    metrics as well.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr
        elif isinstance(node, ast.Dict):
            yield from (
                (key.lineno, key.value)
                for key in node.keys
                if _is_text(key) and key.value.isidentifier()
            )
        elif _is_text(node) and FLAG_OR_METRIC.fullmatch(node.value):
            yield node.lineno, node.value


def _is_text(node: ast.AST | None) -> TypeGuard[Any]:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def hits(path: Path) -> list[str]:
    """The names of a file with a banned word in them, and its own."""
    found = [(1, path.name), *_made_here(ast.parse(path.read_text(encoding="utf-8"), str(path)))]
    return [
        f"{path.relative_to(ROOT)}:{line}: {name}: {BANNED[banned]}"
        for line, name in sorted(set(found))
        if name not in EXEMPT
        for banned in _banned_in(name)
        if not (name.startswith("test_") and "_".join(banned) in IN_SENTENCES)
    ]


@cache
def _banned_in(name: str) -> tuple[tuple[str, ...], ...]:
    """The banned words in a name, each as its parts. Most names are in many files."""
    parts = _words(name)
    return tuple(
        banned
        for banned in BANNED
        if any(parts[i : i + len(banned)] == banned for i in range(len(parts)))
    )


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_name_has_a_banned_word(folder: str) -> None:
    found = [
        hit for path in sorted((ROOT / folder).rglob("*.py")) if path != LIST for hit in hits(path)
    ]
    assert not found, "\n".join(found)


def _docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of the docstrings of a file, those of attributes as well."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and _is_text(node.value):
            yield node.lineno, inspect.cleandoc(node.value.value)


def _sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a docstring.

    An item of a list, a row of a table and a line that is indented by four begin another sentence.
    """
    text = re.sub(r"`[^`]*`", "`code`", text)
    for part in re.split(r"\n(?=\n|- |\d+\. |\|| {4}\S)", text):
        flat = " ".join(part.split())
        yield from re.split(r"(?<=[.!?:]) (?=[A-Z])|(?<=[.!?]) (?=[`*(\d]|vLLM)", flat)


def problems(text: str) -> Iterator[str]:
    """Yield what the sentences of a docstring break of the rule of prose."""
    for sentence in _sentences(text):
        if any(sentence.startswith(first) for first in EXEMPT_SENTENCES):
            continue
        words = len([word for word in sentence.split() if re.search(r"\w", word)])
        if words > MOST_WORDS:
            yield f"{words} words, {MOST_WORDS} at most: {sentence}"
        for banned, instead in SAY.items():
            if re.search(banned, sentence):
                yield f"say {instead}: {sentence}"


@pytest.mark.parametrize("pattern", PROSE)
def test_docstrings_are_plain(pattern: str) -> None:
    files = sorted(ROOT.glob(pattern))
    found = [
        f"{path.relative_to(ROOT)}:{line}: {problem}"
        for path in files
        for line, text in _docstrings(ast.parse(path.read_text(encoding="utf-8"), str(path)))
        for problem in problems(text)
    ]
    assert files
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "text",
    [
        "Whether it runs.",
        "True if it runs. What is left stays.",
        "The requests: those that run.",
        "Wait, or else run.",
        "So many requests wait.",
        "Nobody reads it.",
        "The engine to whom it goes.",
        f"Return{' one' * MOST_WORDS}.",
        f"Args:\n    count:{' one' * MOST_WORDS}.",
    ],
)
def test_a_docstring_that_is_not_plain_is_found(text: str) -> None:
    assert list(problems(text))


def test_short_sentences_pass_together() -> None:
    assert not list(problems(f"One{' more' * (MOST_WORDS - 1)}. Two, so that `a else b` is one."))
