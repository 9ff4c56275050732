"""One word for each thing, the field's where it has one: what the code once called otherwise has
not come back.
"""

import ast
import re
from collections.abc import Iterator
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
        f"{path.relative_to(ROOT)}:{line}: {name}: {instead}"
        for line, name in sorted(set(found))
        if name not in EXEMPT
        for banned, instead in BANNED.items()
        if not (name.startswith("test_") and "_".join(banned) in IN_SENTENCES)
        if any(_words(name)[i : i + len(banned)] == banned for i in range(len(_words(name))))
    ]


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_name_has_a_banned_word(folder: str) -> None:
    found = [
        hit for path in sorted((ROOT / folder).rglob("*.py")) if path != LIST for hit in hits(path)
    ]
    assert not found, "\n".join(found)
