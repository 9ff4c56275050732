"""Flags of a command from the fields of a pydantic model, which has their names, types, defaults,
bounds and help.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from flying_serving.errors import ConfigError

M = TypeVar("M", bound=BaseModel)

NAMES = {"as_json": "--json", "parameters": "--set"}
"""Fields whose flag has another name."""
PLAIN = [kind for plain in (bool, int, float, str, Path) for kind in (plain, plain | None)] + [
    list[str]
]
"""Types that typer parses. For a field of another type it passes the text, which pydantic
parses.
"""
VARIABLES = {"url": "FLYING_SERVING_URL", "api_key": "VLLM_API_KEY"}
"""Fields that an environment variable sets too."""


def flags(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command flags in place of its parameters that are models: one for each field."""
    signature, types = inspect.signature(command), get_type_hints(command, include_extras=True)
    models = {
        name: kind
        for name, kind in types.items()
        if isinstance(kind, type) and issubclass(kind, BaseModel)
    }

    @functools.wraps(command)
    def run(**given: Any) -> None:
        made = {
            name: parse(kind, {field: given.pop(field) for field in kind.model_fields})
            for name, kind in models.items()
        }
        command(**given, **made)

    parameters = []
    for name, parameter in signature.parameters.items():
        if name in models:
            parameters += [_flag(field, info) for field, info in models[name].model_fields.items()]
        else:
            parameters.append(
                parameter.replace(annotation=types[name], kind=inspect.Parameter.KEYWORD_ONLY)
            )
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _flag(name: str, field: FieldInfo) -> inspect.Parameter:
    """Return the parameter from which typer makes a flag."""
    bounds = {
        key: next((getattr(m, key) for m in field.metadata if hasattr(m, key)), None)
        for key in ("ge", "le")
    }
    plain = field.annotation in PLAIN
    default = inspect.Parameter.empty if field.is_required() else field.default if plain else None
    option = typer.Option(
        _flag_name(name),
        help=field.description,
        min=bounds["ge"],
        max=bounds["le"],
        envvar=VARIABLES.get(name),
        show_default=_shown(field.default) if default is None else default != "",
    )
    kind = Annotated[field.annotation if plain else str | None, option]  # type: ignore[valid-type]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)


def _shown(default: Any) -> bool | str:
    """Return the default of a flag that typer does not parse as it is shown; False for none."""
    return default if isinstance(default, str) else False


def _flag_name(field: str) -> str:
    return NAMES.get(field, "--" + field.replace("_", "-"))


def parse(model: type[M], given: Mapping[str, Any]) -> M:
    """Make a model from the values of its flags; a field without a value has its default.

    Raises:
        ConfigError: naming the flag, its value and the allowed values.
    """
    try:
        return model.model_validate(
            {name: value for name, value in given.items() if value is not None}
        )
    except ValidationError as error:
        problem = error.errors()[0]
        name = str(problem["loc"][0])
        message = problem["msg"].removeprefix("Value error, ")
        flag = _flag_name(name)
        raise ConfigError(
            message if message.startswith(flag) else f"{flag}={given[name]!r}: {message}"
        ) from None
