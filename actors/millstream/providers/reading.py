"""An answer as it is read: whatever the library it comes from, and whatever is wrong with it."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

MAX_BODY_CHARS = 4 * 1024 * 1024
"""A longer text is not parsed."""


class Answer(Protocol):
    """What classification needs of an HTTP answer; `httpx.Response` has it.

    `json()` and `text` are tried where they are; a body that cannot be read is no body.
    """

    @property
    def status_code(self) -> int: ...

    @property
    def headers(self) -> Mapping[str, str]: ...


@dataclass(frozen=True, slots=True)
class Read:
    """An answer in plain form: headers in lower case, the decoded JSON body or None, the body's text where it has no JSON."""

    status: int | None
    headers: Mapping[str, str]
    body: Any = None
    text: str = ""

    @property
    def error(self) -> Mapping[str, Any]:
        """The part of the body that names the error; empty where there is none."""
        body = self.body
        if isinstance(body, list) and body:
            body = body[0]  # Gemini's streams answer so
        found = mapping(mapping(body).get("error"))
        return found or mapping(body)


def read(answer: object) -> Read:
    """An answer, or an exception that carries one as `.response` (or by its own attributes), in plain form."""
    response = _attribute(answer, "response")
    if _status(response) is None:
        response = answer
    body, text = _body(response)
    if body is None and not text and response is not answer:
        body, text = _body(answer)
    return Read(_status(response), _headers(_attribute(response, "headers")), body, text)


def mapping(value: object) -> Mapping[str, Any]:
    """The value where it is a JSON object, else an empty one."""
    return cast(Mapping[str, Any], value) if isinstance(value, Mapping) else {}


def items(value: object) -> list[Any]:
    """The value where it is a JSON array, else an empty one."""
    return value if isinstance(value, list) else []


def objects(value: object) -> Iterator[Mapping[str, Any]]:
    """The objects in a JSON array."""
    return (mapping(item) for item in items(value))


def _status(holder: object) -> int | None:
    for name in ("status_code", "status", "code"):
        value = _attribute(holder, name)
        if isinstance(value, int) and not isinstance(value, bool) and 100 <= value <= 999:
            return int(value)
    return None


def _headers(raw: object) -> Mapping[str, str]:
    """Names in lower case; of several values, what the library made of them."""
    pairs = _tried(lambda: [*cast(Mapping[object, object], raw).items()]) or []
    return {_text(name).lower(): _text(value) for name, value in pairs}


def _text(value: object) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)


def _body(answer: object) -> tuple[Any, str]:
    for name in ("body", "details"):  # what the libraries of providers keep in their exceptions
        held = _attribute(answer, name)
        if isinstance(held, Mapping | list):
            return cast(Any, held), ""
    decode = _attribute(answer, "json")
    if callable(decode):
        body = _tried(cast(Callable[[], object], decode))
        if isinstance(body, Mapping | list):
            return cast(Any, body), ""
    text = _attribute(answer, "body")
    if not isinstance(text, str | bytes):
        text = _attribute(answer, "text")
    text = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
    if not isinstance(text, str) or len(text) > MAX_BODY_CHARS:
        return None, ""
    body = _tried(lambda: json.loads(text))
    return (cast(Any, body), "") if isinstance(body, Mapping | list) else (None, text)


def _attribute(holder: object, name: str) -> object:
    return _tried(lambda: getattr(holder, name, None))


def _tried(look: Callable[[], Any]) -> Any:
    """What a look at foreign data gives; None where it fails: a body may be unread, cut off, or nested without end."""
    try:
        return look()
    except Exception:  # noqa: BLE001 - a property or method of a foreign object may raise anything
        return None
