"""The flags of `serve` that vLLM does not have, in groups: for vLLM's parser, for the first screen
of help, and for the tables of docs/serving.md.
"""

import argparse
import re
import shutil
import textwrap
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, get_args, get_origin

from flying_serving.config import GROUPS, FlyingConfig
from flying_serving.validation import allowed_range

PURPOSE = (
    "Serve a model with vLLM, on engines that join into tensor parallel groups and part again "
    "while requests stream."
)
USAGE = "Usage: flying-serving serve MODEL [OPTIONS]"
LAST_COLUMN = 100
TEXT_COLUMN = 28
"""Where the text of the first screen begins, beside the flags."""
_UNSET = re.compile(r"(.*) Default: (.+)\.", re.DOTALL)
"""The description of a field that is None by default: the last sentence says what that means."""
_VALUES = {
    "group_sizes": "SIZES",
    "slo": "TARGETS",
    "clients_may_set": "FIELDS",
    "trace_out": "FILE",
}
_NAME = "NAME"
_UNITS = {"_s": "S", "_ms": "MS", "_bytes": "BYTES"}
"""Values of flags by the end of a field's name; the other numbers are N."""


class Flag(NamedTuple):
    """A flag in words.

    `name`: as it is shown, both forms of a switch together. `value`: what stands for its value;
    empty for a switch. `allowed`: the values; empty where the meaning says them. `meaning`: begins
    with a sentence for the first screen.
    """

    name: str
    value: str
    allowed: str
    default: str
    meaning: str

    @property
    def usage(self) -> str:
        """The flag with its value."""
        return f"{self.name} {self.value}".rstrip()

    @property
    def text(self) -> str:
        """Everything but the usage, in a paragraph."""
        facts = [self.allowed, f"default: {self.default}"]
        return f"{self.meaning} ({'; '.join(filter(None, facts))})"

    @property
    def line(self) -> str:
        """The meaning in a sentence, names that are allowed, and the default in brackets."""
        names = f": {self.allowed}" if self.value == _NAME else ""
        return f"{self.meaning.partition('. ')[0].rstrip('.')}{names} [{self.default}]"


def flag_of(name: str) -> Flag:
    """Return the flag of a field of FlyingConfig."""
    field = FlyingConfig.model_fields[name]
    kind, meaning = field.annotation, " ".join(str(field.description).split())
    if field.default is None:
        unset = _UNSET.fullmatch(meaning)
        assert unset is not None, f"{name}: the description has to end with what None means"
        meaning, default = unset.groups()
    elif isinstance(field.default, bool):
        default = "on" if field.default else "off"
    else:
        default = _number(field.default) if isinstance(field.default, float) else str(field.default)
    if bool in {kind, *get_args(kind)}:
        return Flag(option(name).replace("--", "--[no-]", 1), "", "", default, meaning)
    choices, is_number = _choices(kind), bool({int, float} & {kind, *get_args(kind)})
    units = [unit for end, unit in _UNITS.items() if name.endswith(end)]
    value = _VALUES.get(name) or next(iter(units), "N" if is_number else _NAME)
    allowed = allowed_range(field) if is_number else _any_of(choices)
    return Flag(option(name), value, allowed, default, meaning)


def option(name: str) -> str:
    """Return the flag of a field as argparse knows it."""
    return "--" + name.replace("_", "-")


def add_flags(parser: Any) -> None:
    """Add the groups to a parser of argparse. FlyingConfig checks the values."""
    for group in GROUPS:
        section = parser.add_argument_group(group.title, group.purpose)
        for name in group.fields:
            flag = flag_of(name)
            form: dict[str, Any] = {"metavar": flag.value}
            if not flag.value:
                form = {"action": argparse.BooleanOptionalAction}
            section.add_argument(option(name), default=argparse.SUPPRESS, help=flag.text, **form)


def screen(columns: int | None = None) -> str:
    """Return the first screen of help, for so many columns; by default those of the terminal."""
    here = shutil.get_terminal_size((LAST_COLUMN, 0)).columns
    columns = columns or max(2 * TEXT_COLUMN, min(LAST_COLUMN, here))
    shown = [USAGE, "", *textwrap.wrap(f"{PURPOSE} {_BEFORE}", columns), *_ENGINES]
    return "\n".join([*shown, *_flags(columns), *_AFTER, ""])


_BEFORE = "It takes the flags of `vllm serve`. Two of them set the engines:"
_ENGINES = (
    "  --data-parallel-size N    Engines: 1, 2, 4 or 8 [1]",
    "  --tensor-parallel-size N  Devices of each engine [1]",
    "Flying Serving adds these, with defaults in brackets:",
    "",
)
_AFTER = (
    "",
    "More help:",
    "  --help=all                Every flag, also vLLM's",
    "  --help=GROUP              A group in full: one of these, or of vLLM's, as ParallelConfig",
    "  --help=WORD               Flags with the word in their name, as --help=max-model-len",
    "  flying-serving doctor     What this machine can run; with MODEL, whether it can be served",
)


def _flags(columns: int) -> Iterator[str]:
    for group in GROUPS:
        yield f"{group.title}: {group.purpose}"
        for flag in map(flag_of, group.fields):
            yield textwrap.fill(
                flag.line,
                columns,
                initial_indent=f"  {flag.usage}".ljust(TEXT_COLUMN),
                subsequent_indent=" " * TEXT_COLUMN,
                break_on_hyphens=False,
            )


def _choices(kind: Any) -> tuple[str, ...]:
    """Return the names that a type allows, also in a tuple or beside None."""
    if get_origin(kind) is Literal:
        return get_args(kind)
    return tuple(choice for part in get_args(kind) for choice in _choices(part))


def _any_of(choices: tuple[str, ...]) -> str:
    *more, last = choices or ("",)
    return f"{', '.join(more)} or {last}" if more else last


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else str(value)
