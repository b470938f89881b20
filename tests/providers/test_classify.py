"""Answers of providers, after their documentation: what each says, whatever carries it and however odd it is."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.providers import Classified, classify
from millstream_schemas.permits import Observed, Report

FIXTURES = sorted((Path(__file__).parent / "fixtures").glob("*.json"))
MONDAY = "Mon, 02 Mar 2026 10:00:00 GMT"


def fixture(path: Path) -> dict[str, Any]:
    """One recorded answer and what it must be read as."""
    return json.loads(path.read_text("utf-8"))  # type: ignore[no-any-return]


def answer(recorded: dict[str, Any]) -> httpx.Response:
    """The answer as httpx has it."""
    headers = recorded["headers"]
    if "body" in recorded:
        return httpx.Response(recorded["status"], headers=headers, json=recorded["body"])
    return httpx.Response(recorded["status"], headers=headers, text=recorded["text"])


def throttled(headers: dict[str, str] | None = None, body: object = None) -> Classified:
    """What a bare 429 with these headers is read as."""
    return classify(httpx.Response(429, headers=headers or {}, json=body if body is not None else {}))


def test_there_are_fixtures_of_every_provider() -> None:
    """Otherwise the next test would pass on nothing."""
    assert {path.name.partition("_")[0] for path in FIXTURES} >= {"openai", "anthropic", "gemini", "azure", "plain"}
    assert len(FIXTURES) >= 45


@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: path.stem)
def test_an_answer_is_read_as_its_provider_means_it(path: Path) -> None:
    """Outcome, wait, limits shown, tokens used."""
    recorded = fixture(path)
    expected = recorded["expect"]
    said = classify(answer(recorded))
    assert said.outcome == expected["outcome"]
    if expected["retry_after_s"] is None:
        assert said.retry_after_s is None
    else:
        assert said.retry_after_s == pytest.approx(expected["retry_after_s"])
    assert list(said.observed) == [msgspec.convert(one, Observed) for one in expected["observed"]]
    used = None if said.usage is None else [said.usage.tokens_in, said.usage.tokens_out, said.usage.cached]
    assert used == expected.get("usage")
    assert (said.detail == "") == (said.outcome == "ok")


@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: path.stem)
def test_the_same_is_read_from_an_exception_that_carries_the_answer(path: Path) -> None:
    """`httpx.HTTPStatusError` and the exceptions of the providers' own libraries."""
    recorded = fixture(path)
    response = answer(recorded)
    assert classify(
        httpx.HTTPStatusError("no", request=httpx.Request("GET", "http://x"), response=response)
    ) == classify(response)


@pytest.mark.parametrize(
    "path", [path for path in FIXTURES if path.stem[:6] in ("openai", "anthro")], ids=lambda p: p.stem
)
def test_the_same_is_read_where_only_status_headers_and_the_inner_error_are_left(path: Path) -> None:
    """Some libraries keep the part below `error` as the exception's body."""
    recorded = fixture(path)
    body = recorded["body"].get("error", recorded["body"])
    held = SimpleNamespace(status_code=recorded["status"], headers=recorded["headers"], body=body)
    assert classify(held) == classify(answer(recorded))


# --- how long to wait ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("7", 7.0),
        ("0.25", 0.25),
        (" 3 ", 3.0),
        ("99999999", None),
        ("86400", 86400.0),
        ("Mon, 02 Mar 2026 10:00:45 GMT", 45.0),
        ("Mon, 02 Mar 2026 09:59:00 GMT", None),
        ("Fri, 02 Mar 2046 10:00:45 GMT", None),
        ("0", None),
        ("-1", None),
        ("abc", None),
        ("", None),
        ("nan", None),
        ("inf", None),
        ("1e999", None),
        ("1_000", None),
        ("٣", None),
        ("9" * 5000, None),
        ("Mon, 99 Foo 2026 99:99:99 GMT", None),
    ],
)
def test_retry_after_in_its_forms(value: str, seconds: float | None) -> None:
    """Seconds, whole or not, or a date by the provider's own clock; junk, and what is longer than a day, says nothing."""
    held = SimpleNamespace(status_code=429, headers={"Date": MONDAY, "Retry-After": value})
    assert classify(held).retry_after_s == seconds


def test_a_date_without_the_providers_clock_goes_by_ours() -> None:
    """Within the accuracy of whole seconds and of two clocks."""
    moment = format_datetime(datetime.now(UTC) + timedelta(seconds=100), usegmt=True)
    seconds = throttled({"retry-after": moment}).retry_after_s
    assert seconds is not None
    assert 60 < seconds <= 101


def test_the_most_exact_hint_goes_first_and_junk_falls_through() -> None:
    """RetryInfo, milliseconds, seconds, reset of what is used up."""
    info = {"error": {"details": [{"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "1.5s"}]}}
    headers = {"retry-after-ms": "2500", "retry-after": "4", "x-ratelimit-remaining-requests": "0"}
    headers["x-ratelimit-reset-requests"] = "6m0s"
    assert throttled(headers, info).retry_after_s == 1.5
    info["error"]["details"][0]["retryDelay"] = "soon"
    assert throttled(headers, info).retry_after_s == 2.5
    headers["retry-after-ms"] = "-1"
    assert throttled(headers, info).retry_after_s == 4.0
    headers["retry-after"] = "abc"
    assert throttled(headers, info).retry_after_s == 360.0
    headers["x-ratelimit-remaining-requests"] = "12"
    assert throttled(headers, info).retry_after_s is None


@pytest.mark.parametrize(
    ("reset", "seconds"),
    [("20ms", 0.02), ("1s", 1.0), ("6m0s", 360.0), ("1h2m3.5s", 3723.5), ("4d", 86400.0), ("17", 17.0), ("x", None)],
)
def test_resets_are_durations_seconds_or_moments(reset: str, seconds: float | None) -> None:
    """As OpenAI and its likes write them."""
    headers = {"x-ratelimit-limit-requests": "10", "x-ratelimit-reset-requests": reset}
    assert classify(httpx.Response(200, headers=headers)).observed[0].reset_s == seconds


# --- junk ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", ["0", "-1", "", "abc", "NaN", "1e9", "99999999999999", "9" * 5000])
def test_a_limit_that_makes_no_sense_is_left_out_with_what_stands_beside_it(limit: str) -> None:
    """It could only tighten ours by mistake."""
    headers = {"x-ratelimit-limit-requests": limit, "x-ratelimit-remaining-requests": "0"}
    assert classify(SimpleNamespace(status_code=200, headers=headers)).observed == ()


def test_more_left_than_allowed_is_not_believed() -> None:
    """The limit stays, since it alone makes sense."""
    headers = {"x-ratelimit-limit-requests": "10", "x-ratelimit-remaining-requests": "11"}
    assert classify(httpx.Response(200, headers=headers)).observed == (Observed(dimension="requests", limit=10),)


def test_anthropics_tightest_limit_counts_only_where_the_exact_ones_are_missing() -> None:
    """It may be that of the input alone."""
    headers = {"anthropic-ratelimit-tokens-limit": "1000", "anthropic-ratelimit-tokens-remaining": "10"}
    assert [one.dimension for one in classify(httpx.Response(200, headers=headers)).observed] == ["tokens"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"null",
        b"[]",
        b"3",
        b'"x"',
        b"{",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"error": 3}',
        b'{"error": {"details": {"a": []}}}',
    ],
)
def test_a_body_that_says_nothing_leaves_the_status(content: bytes) -> None:
    """Cut off, of another kind, or made to break parsers."""
    assert classify(httpx.Response(429, content=content)).outcome == "throttled"
    assert classify(httpx.Response(500, content=content)).outcome == "fault"
    assert classify(httpx.Response(200, content=content)).outcome == "ok"


def test_an_answer_that_was_not_read_goes_by_status_and_headers() -> None:
    """Classification never reads a stream."""

    class Untouched(httpx.SyncByteStream):
        def __iter__(self) -> Any:
            raise AssertionError("the stream was read")

    said = classify(httpx.Response(429, headers={"retry-after": "3"}, stream=Untouched()))
    assert (said.outcome, said.retry_after_s) == ("throttled", 3.0)


@pytest.mark.parametrize("nothing", [None, 3, "text", RuntimeError("x"), SimpleNamespace(status_code="429"), object()])
def test_without_a_status_nothing_is_known(nothing: object) -> None:
    """A lost connection may have been billed."""
    assert classify(nothing).outcome == "unknown"


def test_an_exception_whose_attributes_fail_is_read_as_far_as_it_goes() -> None:
    """User code may make anything of an exception."""

    class Hostile(Exception):
        status_code = 503

        @property
        def response(self) -> object:
            raise RuntimeError

        @property
        def headers(self) -> object:
            raise RuntimeError

        def json(self) -> object:
            raise RecursionError

    assert classify(Hostile()).outcome == "overloaded"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                ["error", "message", "code", "type", "details", "@type", "violations", "usage", "input_tokens"]
            )
            | st.text(max_size=5),
            inner,
            max_size=5,
        )
    ),
    max_leaves=25,
)
NAMES = st.sampled_from(
    [
        "retry-after", "retry-after-ms", "date", "x-should-retry", "x-ratelimit-limit-requests",
        "x-ratelimit-remaining-requests", "x-ratelimit-reset-requests", "anthropic-ratelimit-input-tokens-limit",
        "anthropic-ratelimit-input-tokens-remaining", "anthropic-ratelimit-input-tokens-reset",
    ]
)  # fmt: skip
VALUES = st.one_of(
    st.text(max_size=30),
    st.floats().map(str),
    st.integers().map(str),
    st.sampled_from(["0", "-1", "6m0s", MONDAY, "2026-03-02T10:00:02Z", "0001-01-01T00:00:00+23:59", "false"]),
)


@given(st.integers(-10, 1200), st.dictionaries(NAMES, VALUES, max_size=6), JSON)
def test_whatever_comes_back_is_classified_into_what_the_governor_accepts(
    status: int, headers: dict[str, str], body: object
) -> None:
    """Never an exception, and always within the bounds of the protocol."""
    said = classify(SimpleNamespace(status_code=status, headers=headers, body=body))
    report = Report(keys=("k",), outcome=said.outcome, retry_after_s=said.retry_after_s, observed=said.observed)
    assert msgspec.json.decode(msgspec.json.encode(report), type=Report) == report
    assert len(said.detail) <= 300
