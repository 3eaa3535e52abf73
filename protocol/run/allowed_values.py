"""Words for the values that a key of a run file allows, and for a wrong value; people never read the validating library's."""

import difflib
import json
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from dilocox.protocol.ids import printable

__all__ = ["PATTERNS", "allowed", "annotated", "faults", "raise_all", "section_of"]

PATTERNS = {
    r"^[0-9a-f]{64}$": "64 hexadecimal digits, 0-9 and a-f",
    r"^[A-Za-z0-9._-]{1,64}$": "1 to 64 ASCII letters, digits, dots, dashes and underscores",
    r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$": "1 to 64 letters, digits, dots, dashes and underscores, beginning with a letter or digit",
    r"^[a-z0-9-]{1,32}$": "1 to 32 lower-case letters, digits and dashes",
    r"^([0-9a-fA-F]{64,128}|[*])(:([0-9a-fA-F]{64,128}|[*]))*$": "registers of 64 to 128 hex digits, or *, joined by colons",
    r"^0x[0-9a-f]{40}$": "0x and 40 hexadecimal digits, 0-9 and a-f",
}
"""Descriptions of texts, by the pattern that validates them."""
SHOWN_CHARACTERS = 60
"""Most characters of a wrong value in a message."""
PLACEHOLDER = re.compile(r"\{[a-z_]+\}")
"""Part of a preset that `dilocox init` replaces."""


def raise_all(faults: Iterator[str]) -> None:
    """Raise ValueError with all that is wrong, a line each."""
    if found := list(faults):
        raise ValueError("\n".join(found))


def faults(model: type[BaseModel], error: ValidationError, document: Any) -> list[tuple[str, str]]:
    """Return (path of a key, what is wrong with it), one for each key; the path is empty for the whole file."""
    found: dict[tuple[str, str], None] = {}
    said: set[str] = set()
    for item in error.errors(include_url=False):
        path, annotation, section = _key(model, item["loc"])
        name = ".".join(map(str, path))
        if item["type"] == "value_error":
            found |= dict.fromkeys((name, line) for line in item["msg"].removeprefix("Value error, ").split("\n"))
        elif item["type"] == "extra_forbidden":
            key = ".".join(map(str, item["loc"]))
            found[key, _unknown(str(item["loc"][-1]), section)] = None
        elif name not in said:
            said.add(name)
            found[name, _wrong(_value(document, path), allowed(annotation))] = None
    return list(found)


_NOTHING = object()


def _wrong(value: Any, may_be: str) -> str:
    if value is _NOTHING:
        return f"is missing; allowed: {may_be}"
    shown = _shown(value)
    if isinstance(value, str) and PLACEHOLDER.fullmatch(value):
        return f"{shown} is a placeholder of the preset: run `dilocox init` to fill it in; allowed: {may_be}"
    return f"{shown} is not allowed; allowed: {may_be}"


def _shown(value: Any) -> str:
    """Return a value as a run file has it, cut where it is long."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        text = "this value" if isinstance(value, dict | list) else str(value)
    text = printable(text)
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "…"


def _unknown(key: str, section: type[BaseModel]) -> str:
    if hint := getattr(section, "HINTS", {}).get(key):
        return f"no such key: {hint}"
    known = list(section.model_fields)
    near = difflib.get_close_matches(key, known, n=1)
    return "no such key" + (f"; did you mean {near[0]}?" if near else f"; known: {', '.join(known)}")


def _key(model: type[BaseModel], location: Sequence[int | str]) -> tuple[list[int | str], Any, type[BaseModel]]:
    """Return the path of the key that an error is about, what it may be, and its section; the rest of a location is the library's
    own, such as the branch of a union."""
    path: list[int | str] = []
    section, annotation = model, Annotated[Any, model]
    for part in location:
        if part in section.model_fields and (not path or section_of(annotation) is section):
            field = section.model_fields[str(part)]
            annotation = annotated(field)
            section = section_of(annotation) or section
        elif _item(annotation, part) is not None:
            annotation = _item(annotation, part)
        else:
            break
        path.append(part)
    return path, annotation, section


def annotated(field: FieldInfo) -> Any:
    return Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation


def _bare(annotation: Any) -> tuple[Any, list[Any]]:
    """Return an annotation without what bounds it, and that."""
    if get_origin(annotation) is Annotated:
        inner, *bounds = get_args(annotation)
        bare, more = _bare(inner)
        flat = [each for bound in bounds for each in (bound.metadata if isinstance(bound, FieldInfo) else [bound])]
        return bare, [*more, *flat]
    return annotation, []


def _branches(annotation: Any) -> list[Any]:
    """Return what a union is of, without None; a key may always be left out where it may be None."""
    bare, bounds = _bare(annotation)
    if get_origin(bare) not in (Union, types.UnionType):
        return [annotation]
    kinds = [kind for kind in get_args(bare) if kind is not type(None)]
    return [Annotated[kind, *bounds] if bounds else kind for kind in kinds]


def section_of(annotation: Any) -> type[BaseModel] | None:
    bare = (_bare(kind)[0] for kind in _branches(annotation))
    return next((kind for kind in bare if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def _item(annotation: Any, part: int | str) -> Any:
    """Return what one item of a list or table may be; None where it is neither."""
    for kind in _branches(annotation):
        bare, _ = _bare(kind)
        if get_origin(bare) is tuple and isinstance(part, int):
            return get_args(bare)[0]
        if get_origin(bare) is dict and isinstance(part, str) and part != "[key]":
            return get_args(bare)[1]
    return None


def _value(document: Any, path: Sequence[int | str]) -> Any:
    for part in path:
        try:
            document = document[part]
        except (LookupError, TypeError):
            return _NOTHING
    return document


def allowed(annotation: Any) -> str:
    """Return what a key may be, in words."""
    return " or ".join(dict.fromkeys(_one(kind) for kind in _branches(annotation)))


def _one(annotation: Any) -> str:
    bare, bounds = _bare(annotation)
    origin = get_origin(bare)
    if origin is Literal:
        return ("one of " if len(get_args(bare)) > 1 else "") + ", ".join(json.dumps(each) for each in get_args(bare))
    if origin is tuple:
        return f"a list, each {allowed(get_args(bare)[0])}"
    if origin is dict:
        return f"a table, each value {allowed(get_args(bare)[1])}"
    if bare is bool:
        return "true or false"
    if bare is str:
        pattern = next((each.pattern for each in bounds if getattr(each, "pattern", None)), None)
        return f"a text of {PATTERNS[pattern]}" if pattern is not None else "a text"
    if bare in (int, float):
        return _number(bare is int, bounds)
    return "a section of keys"


def _number(whole: bool, bounds: Sequence[Any]) -> str:
    limits: dict[str, float] = {}
    for bound in bounds:
        for name in ("gt", "ge", "lt", "le"):
            if (value := getattr(bound, name, None)) is not None:
                limits[name] = value
    if whole and "gt" in limits:
        limits["ge"] = limits.pop("gt") + 1
    if whole and "lt" in limits:
        limits["le"] = limits.pop("lt") - 1
    words: Mapping[str, str] = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
    told = [f"{word} {limits[name]:,}" for name, word in words.items() if name in limits]
    return " ".join([f"a {'whole ' if whole else ''}number", " and ".join(told)]).strip()
