"""Query parameters of the API, and the answer to an invalid one. A handler reads the parameters it declares; /openapi.json
lists them."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from aiohttp import web

from dilocox.views.error_codes import FAULTS, do_about

__all__ = ["Flag", "Handler", "Number", "Parameter", "Problem", "Word", "declared", "takes"]

View = dict[str, Any]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
H = TypeVar("H", bound=Handler)


class Problem(Exception):
    """An answer in application/problem+json. `code`: one of FAULTS that has a status."""

    def __init__(self, code: str, title: str) -> None:
        super().__init__(title)
        self.code = code

    def document(self, status: int | None = None) -> View:
        """`status`: where it is another than usual."""
        document = {"type": "about:blank", "title": str(self), "status": status or FAULTS[self.code].status, "code": self.code}
        return {**document, "do": do} if (do := do_about(self.code)) is not None else document


@dataclass(frozen=True, kw_only=True)
class Parameter:
    name: str
    says: str
    """Description for people."""
    code: str = ""
    """Error code of an invalid value."""
    wrong: str = ""
    """Title of that problem."""
    header: bool = False
    """It comes in a header, and not in the query."""

    @property
    def schema(self) -> View:
        raise NotImplementedError

    @property
    def view(self) -> View:
        """Return the parameter as an OpenAPI object."""
        place = "header" if self.header else "query"
        return {"name": self.name, "in": place, "required": False, "description": self.says, "schema": self.schema}

    def _text(self, request: web.Request) -> str:
        """Return the value; empty if the request has none."""
        assert self in declared(request.match_info.handler), f"{request.path} reads {self.name} and does not declare it"
        return (request.headers if self.header else request.query).get(self.name, "")


@dataclass(frozen=True, kw_only=True)
class Number(Parameter):
    digits: int
    """Most digits."""

    @property
    def schema(self) -> View:
        return {"type": "integer", "minimum": 0, "maximum": 10**self.digits - 1}

    def read(self, request: web.Request) -> int | None:
        """Return the number; None if the request has none. Raises Problem."""
        text = self._text(request)
        if text and not (text.isascii() and text.isdecimal() and len(text) <= self.digits):
            raise Problem(self.code, self.wrong)
        return int(text) if text else None


@dataclass(frozen=True, kw_only=True)
class Word(Parameter):
    longest: int
    """Most characters."""

    @property
    def schema(self) -> View:
        return {"type": "string", "maxLength": self.longest}

    def read(self, request: web.Request) -> str:
        """Return the value; empty if the request has none. Raises Problem."""
        text = self._text(request)
        if len(text) > self.longest:
            raise Problem(self.code, self.wrong)
        return text


@dataclass(frozen=True, kw_only=True)
class Flag(Parameter):
    word: str
    """The one that means anything."""

    @property
    def schema(self) -> View:
        return {"type": "string", "enum": [self.word]}

    def read(self, request: web.Request) -> bool:
        """Return whether the request sets the flag."""
        return self._text(request) == self.word


def takes(*parameters: Parameter) -> Callable[[H], H]:
    """Declare the parameters that a handler reads."""

    def declare(handler: H) -> H:
        handler.takes = parameters  # type: ignore[attr-defined]
        return handler

    return declare


def declared(handler: Any) -> tuple[Parameter, ...]:
    found: tuple[Parameter, ...] = getattr(handler, "takes", ())
    return found
