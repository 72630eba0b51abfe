"""A user's own part, named as `module:attribute`: load it and check its parameters, before anything slow starts.

Shared by environments (`env.target`) and rewards (`reward.target`): `rl.build` calls `load_target` for both. Only
`inspect` is used, so a wrong parameter is found without running the part.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any


class ExtensionError(ValueError):
    """A target that cannot be loaded, or parameters that do not fit it."""


def load_target(target: str, params: Mapping[str, object], key: str, *, given: int = 0) -> Callable[..., Any]:
    """Import `module:attribute` and check that it can be called with `params`.

    Args:
        target: The part, as `module:attribute`; the module must be importable from the working folder.
        params: Keyword arguments of the part.
        key: The part's place in the configuration, `env` or `reward`, for messages.
        given: How many positional arguments a *function* receives besides `params`. A class receives none: it is made
            from `params` alone.

    Raises:
        ExtensionError: When there is no such module or attribute, it cannot be called, or the parameters do not fit.
    """
    part = _import(target, f"{key}.target")
    if not callable(part):
        raise ExtensionError(f"{key}.target: not callable, got {target!r}; name a class or a function")
    check_params(part, params, f"{key}.params", given=0 if inspect.isclass(part) else given)
    return part


def _import(target: str, key: str) -> object:
    module_name, _, attribute = target.partition(":")
    if not module_name or not attribute:
        raise ExtensionError(f"{key}: not of the form module:attribute, got {target!r}; write my_pkg.my_module:MyName")
    try:
        part: object = importlib.import_module(module_name)
    except ModuleNotFoundError as problem:
        missing = problem.name or module_name
        if module_name != missing and not module_name.startswith(f"{missing}."):
            raise ExtensionError(
                f"{key}: {module_name} needs the module {missing!r}, which is missing, got {target!r}; install it"
            ) from problem
        raise ExtensionError(
            f"{key}: no module named {missing!r}, got {target!r}; run from the folder that holds it, or install it"
        ) from problem
    except Exception as problem:  # a user's module may raise anything while it is imported
        raise ExtensionError(
            f"{key}: importing {module_name} raised {type(problem).__name__}: {' '.join(str(problem).split())}, "
            f"got {target!r}; fix the module"
        ) from problem
    for name in attribute.split("."):
        if not hasattr(part, name):
            hint = _nearest(name, [known for known in dir(part) if not known.startswith("_")])
            raise ExtensionError(f"{key}: {module_name} has no {name!r}, got {target!r}; {hint}")
        part = getattr(part, name)
    return part


def check_params(part: Callable[..., Any], params: Mapping[str, object], key: str, *, given: int = 0) -> None:
    """Check `params` against the signature of `part`, after `given` positional arguments. Raises `ExtensionError`."""
    try:
        signature = inspect.signature(part)
    except (ValueError, TypeError):  # some builtins have none
        return
    free, open_ended = _free_parameters(signature, part, given, key)
    for name, value in params.items():
        if name not in free and not open_ended:
            known = f"it takes {', '.join(free)}" if free else "it takes none"
            raise ExtensionError(
                f"{key}.{name}: no such parameter of {_name(part)}, got {value!r}; {_nearest(name, free, known)}"
            )
    missing = [name for name, default in free.items() if default is inspect.Parameter.empty and name not in params]
    if missing:
        raise ExtensionError(
            f"{key}.{missing[0]}: missing, got {dict(params)!r}; {_name(part)} needs +{key}.{missing[0]}=..."
        )


def _free_parameters(
    signature: inspect.Signature, part: Callable[..., Any], given: int, key: str
) -> tuple[dict[str, object], bool]:
    """Parameters that keywords may set, with their defaults, and whether any other keyword is taken too."""
    positional_kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    kinds = [parameter.kind for parameter in signature.parameters.values()]
    num_positional = sum(kind in positional_kinds for kind in kinds)
    if num_positional < given and inspect.Parameter.VAR_POSITIONAL not in kinds:
        raise ExtensionError(
            f"{key.partition('.')[0]}.target: must take {given} positional arguments, got {_name(part)}{signature}; "
            "add the missing ones"
        )
    left = list(signature.parameters.values())[min(given, num_positional) :]
    keyword_kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    free = {parameter.name: parameter.default for parameter in left if parameter.kind in keyword_kinds}
    return free, inspect.Parameter.VAR_KEYWORD in kinds


def _name(part: object) -> str:
    return getattr(part, "__name__", type(part).__name__)


def _nearest(name: str, known: Iterable[str], otherwise: str | None = None) -> str:
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1)
    if near:
        return f"did you mean {near[0]!r}?"
    return otherwise or f"it has {', '.join(sorted(names)[:8]) or 'nothing public'}"
