"""Triton's interpreter, a third of whose time goes into one search: at each call of a function it looks through all of
triton.language for what it must replace there. The tests search once."""

from __future__ import annotations

import inspect
from typing import Any


def search_once() -> None:
    """Call it while no kernel runs: what the interpreter replaces is not found any more until it puts it back."""
    from triton import language
    from triton.runtime import interpreter

    is_builtin, patch_builtin = language.core.is_builtin, interpreter._patch_builtin
    searched = (language, language.core, language.math, language.tensor, language.core.tensor_descriptor_base)
    names = {each: [name for name, _ in inspect.getmembers(each, is_builtin)] for each in searched}

    def patch_found(package: Any, builder: Any, scope: Any) -> None:
        if package not in names:
            patch_builtin(package, builder, scope)
            return
        for name in names[package]:
            member = getattr(package, name)
            if is_builtin(member):
                interpreter._patch_attr(package, name, member, builder, scope)

    interpreter._patch_builtin = patch_found
