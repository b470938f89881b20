"""A small client for OpenAI-compatible endpoints: one call in, one HTTP request out.

It never retries. A hidden retry would be a call that no permit was asked for, so throttling and errors are raised
and the caller's retry policy decides.
"""

import math
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx
import msgspec

DEFAULT_CHAT_MODEL = "gpt-4o-mini"
DEFAULT_EMBEDDING_MODEL = "text-embedding-3-small"
DEFAULT_RETRY_AFTER_S = 1.0
MAX_RETRY_AFTER_S = 86_400.0
NO_ANSWER = 0

_INSTRUCTION = "Summarise the user's note in at most three sentences. Answer with the summary alone."
_SUMMARY_MAX_TOKENS = 300
# Asked for again, an answer with one of these may be another one.
_PASSING_STATUSES = frozenset({NO_ANSWER, 408, 409})
_QUOTA_SPENT = "insufficient_quota"

T = TypeVar("T")


class ModelThrottled(Exception):
    """The endpoint answered 429; ask again after `retry_after_s` seconds, at least 0 and at most a day."""

    def __init__(self, retry_after_s: float) -> None:
        super().__init__(f"throttled by the model endpoint, retry after {retry_after_s:g} s")
        self.retry_after_s = retry_after_s


class ModelError(Exception):
    """The endpoint answered anything else but a usable result; `status` is 0 where there was no HTTP answer at all."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"model endpoint: {message}" if status == NO_ANSWER else f"model endpoint: {status} {message}")
        self.status = status
        self.message = message

    @property
    def retryable(self) -> bool:
        """Tell whether the same call may succeed later: no answer, a conflict, or the server's own fault."""
        return self.status >= 500 or self.status in _PASSING_STATUSES


class Usage(msgspec.Struct, frozen=True):
    """What one call cost, in tokens."""

    tokens_in: int = 0
    tokens_out: int = 0


class _WireUsage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Message(msgspec.Struct, frozen=True):
    content: str


class _Choice(msgspec.Struct, frozen=True):
    message: _Message


class _Chat(msgspec.Struct, frozen=True):
    choices: list[_Choice]
    usage: _WireUsage = _WireUsage()


class _Embedding(msgspec.Struct, frozen=True):
    embedding: list[float]


class _Embeddings(msgspec.Struct, frozen=True):
    data: list[_Embedding]
    usage: _WireUsage = _WireUsage()


class _ErrorDetail(msgspec.Struct, frozen=True):
    message: str = ""
    code: str | int | None = None


class _ErrorBody(msgspec.Struct, frozen=True):
    error: _ErrorDetail = _ErrorDetail()


class OpenAIClient:
    """Summaries and embeddings from one endpoint; use it as an async context manager, or call `close`.

    `base_url` ends where the API's paths begin, as `OPENAI_BASE_URL` does (`https://host/v1`). An `http` client that
    is passed in stays the caller's to close. Calls may run side by side.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str = "",
        *,
        chat_model: str = DEFAULT_CHAT_MODEL,
        embedding_model: str = DEFAULT_EMBEDDING_MODEL,
        timeout_s: float = 60.0,
        http: httpx.AsyncClient | None = None,
    ) -> None:
        self._base_url = base_url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._chat_model = chat_model
        self._embedding_model = embedding_model
        self._timeout_s = timeout_s
        self._http = http or httpx.AsyncClient()
        self._owns_http = http is None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections this client opened; a second time does nothing."""
        if self._owns_http:
            await self._http.aclose()

    async def summarize(self, text: str) -> tuple[str, Usage]:
        """Return a short summary of `text` and what it cost.

        Raises:
            ModelThrottled: the endpoint answered 429.
            ModelError: any other failure, an answer without a summary included.
        """
        messages = [{"role": "system", "content": _INSTRUCTION}, {"role": "user", "content": text}]
        body = {"model": self._chat_model, "messages": messages, "max_tokens": _SUMMARY_MAX_TOKENS}
        answer = await self._post("/chat/completions", body, _Chat)
        if not answer.choices:
            raise ModelError(502, "the answer holds no choices")
        return answer.choices[0].message.content, _usage(answer.usage)

    async def embed(self, text: str) -> tuple[list[float], Usage]:
        """Return the embedding of `text` and what it cost.

        Raises:
            ModelThrottled: the endpoint answered 429.
            ModelError: any other failure, an answer without a vector included.
        """
        body = {"model": self._embedding_model, "input": text, "encoding_format": "float"}
        answer = await self._post("/embeddings", body, _Embeddings)
        if not answer.data:
            raise ModelError(502, "the answer holds no embedding")
        return answer.data[0].embedding, _usage(answer.usage)

    async def _post(self, path: str, body: Mapping[str, Any], kind: type[T]) -> T:
        try:
            response = await self._http.post(
                self._base_url + path, json=body, headers=self._headers, timeout=self._timeout_s
            )
        except httpx.HTTPError as error:
            raise ModelError(NO_ANSWER, f"{type(error).__name__}: {error}") from error
        if response.status_code != 200:
            raise _failure(response)
        try:
            return msgspec.json.decode(response.content, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ModelError(502, f"an answer that does not fit: {error}") from error


def retry_after_s(headers: Mapping[str, str]) -> float:
    """Return the seconds a 429 asks to wait: `retry-after-ms`, else `retry-after` as seconds or as an HTTP date.

    A date is compared with the response's own `date`, since two clocks may differ. Without a usable header it is one
    second; the result lies between 0 and a day.
    """
    for name, unit_s in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        try:
            wait_s = float(headers.get(name, "")) * unit_s
        except ValueError:
            continue
        if math.isfinite(wait_s):
            return min(max(wait_s, 0.0), MAX_RETRY_AFTER_S)
    try:
        until = parsedate_to_datetime(headers.get("retry-after", ""))
        sent = parsedate_to_datetime(headers["date"]) if "date" in headers else datetime.now(UTC)
        return min(max((until - sent).total_seconds(), 0.0), MAX_RETRY_AFTER_S)
    except (ValueError, TypeError):
        return DEFAULT_RETRY_AFTER_S


def _failure(response: httpx.Response) -> ModelThrottled | ModelError:
    try:
        detail = msgspec.json.decode(response.content, type=_ErrorBody).error
    except (msgspec.DecodeError, UnicodeDecodeError):
        detail = _ErrorDetail()
    # A spent quota also comes as 429, but no waiting brings it back.
    if response.status_code == 429 and detail.code != _QUOTA_SPENT:
        return ModelThrottled(retry_after_s(response.headers))
    return ModelError(response.status_code, detail.message or response.reason_phrase)


def _usage(wire: _WireUsage) -> Usage:
    return Usage(tokens_in=wire.prompt_tokens, tokens_out=wire.completion_tokens)
