"""What `--help` says: a script's docstring, wrapped to the terminal, and each argument's, with its default in words.

tyro makes the list of arguments from a dataclass. It leaves a description unwrapped, breaks a field's docstring where
its source does, and shows `None` among the choices and as the default of what is chosen later; hence this.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import os
import shutil
import textwrap
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NotRequired, TypedDict, Union, get_args, get_origin, get_type_hints

from cs336_systems.configs import MODEL_SIZES

_NAMES = {int: "INT", float: "FLOAT", str: "STR", Path: "PATH"}
_NARROWEST = 40
_WIDEST = 120
_LONG = 25


@contextmanager
def wide_enough() -> Generator[None]:
    """While it lasts, a terminal of fewer than 40 columns is taken for one of 40: tyro's boxes have words in columns,
    and in less than a word's width it searches for a line's end for ever."""
    given = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = str(max(_NARROWEST, shutil.get_terminal_size().columns))
    try:
        yield
    finally:
        if given is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = given


def wrapped(text: str) -> str:
    """A script's docstring: paragraphs filled to the terminal's width (120 at most), indented lines as they are."""
    width = min(shutil.get_terminal_size().columns, _WIDEST)
    fill = textwrap.TextWrapper(width, break_on_hyphens=False, break_long_words=False).fill
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(part if part.startswith(" ") else fill(part) for part in paragraphs)


def explained(arguments: Any) -> tuple[Any, dict[str, Any]]:
    """A TypedDict of a dataclass's fields, with what tyro is to say of each, and the defaults that are not None.

    The last sentence of a field's docstring, where it is "Default: …", stands in the place of a default of None or (),
    which say nothing by themselves. A field with such a default is there only if it is given: tyro would take `None`
    for one of its values, and name it among them, and `--only` without a value would be no `--only`. Where all sizes of
    models are listed, each is said to be what it is.
    """
    import tyro

    docs = field_docs(arguments)
    hints, bare = get_type_hints(arguments, include_extras=True), get_type_hints(arguments)
    fields: dict[str, Any] = {}
    defaults: dict[str, Any] = {}
    for field in dataclasses.fields(arguments):
        text, _, default = docs.get(field.name, "").partition("Default: ")
        text = text.replace(", ".join(MODEL_SIZES), _sizes())
        options: dict[str, Any] = {"help": text.strip() or None}
        hint: Any = hints[field.name]
        is_chosen_later = field.default is None or field.default == ()
        if is_chosen_later:
            options["help_behavior_hint"] = f"(default: {default.removesuffix('.')})" if default else ""
            options["metavar"] = _metavar(bare[field.name])
        if field.default is None:
            hint = _without_none(hint)
        elif field.default is dataclasses.MISSING:
            options["help_behavior_hint"] = "(required)"
        elif not is_chosen_later:
            defaults[field.name] = field.default
        hint = Annotated[hint, tyro.conf.arg(**options)]
        fields[field.name] = NotRequired[hint] if is_chosen_later else hint
    return TypedDict(arguments.__name__, fields), defaults  # ty: ignore[invalid-argument-type]


def without_flag(arguments: Any) -> list[str]:
    """The names of a dataclass's fields that are given by their place alone."""
    import tyro

    hints = get_type_hints(arguments, include_extras=True)
    return [name for name, hint in hints.items() if tyro.conf.Positional in getattr(hint, "__metadata__", ())]


def _sizes() -> str:
    """The sizes' names, each with its layers and d_model: "tiny (2 layers, d_model 128), small (12, 768), …"."""
    (first, size), *others = MODEL_SIZES.items()
    shown = [f"{first} ({size.num_layers} layers, d_model {size.d_model})"]
    return ", ".join(shown + [f"{name} ({size.num_layers}, {size.d_model})" for name, size in others])


def field_docs(arguments: type) -> dict[str, str]:
    """The string under each field of a dataclass and of those that it derives from, on one line; none where the source
    is not at hand."""
    docs = {}
    for kind in reversed(arguments.__mro__):
        if dataclasses.is_dataclass(kind):
            try:
                (definition,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
            except (OSError, TypeError):
                continue
            assert isinstance(definition, ast.ClassDef)
            for field, below in zip(definition.body, definition.body[1:], strict=False):
                if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
                    docs[ast.unparse(field.target)] = " ".join(str(ast.literal_eval(below.value)).split())
    return docs


def _without_none(hint: Any) -> Any:
    """`int` for `int | None`; any other type as it is."""
    if get_origin(hint) in (Union, UnionType):
        (hint,) = (kind for kind in get_args(hint) if kind is not NoneType)
    return hint


def _metavar(hint: Any) -> str:
    """What stands for the values of a type other than None, e.g. "INT" for `int | None`."""
    hint = _without_none(hint)
    if get_origin(hint) is tuple:
        one = _metavar(get_args(hint)[0])
        return f"[{one} [{one} ...]]" if len(one) < _LONG else f"[{one} [...]]"  # as tyro has it
    if get_origin(hint) is Literal:
        return f"{{{','.join(map(str, get_args(hint)))}}}"
    return _NAMES[hint]
