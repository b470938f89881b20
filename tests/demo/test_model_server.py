"""The demo's model server as a real process, and the client that talks to it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypedDict

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.demo import bundled_texts
from millstream.demo.openai_client import ModelError, ModelThrottled, OpenAIClient, retry_after_s
from millstream.demo.sliding import SlidingWindow, Stats
from millstream.demo.text import cosine, split_sentences
from tests.support.waiting import wait_until_sync

NOTE = bundled_texts()["01-the-mill-race.md"]
COMMAND = (sys.executable, "-m", "millstream.demo.modelserver", "--port", "0")
FAST = ("--latency-min-ms", "0", "--latency-max-ms", "1")


class Ready(TypedDict):
    """The first line that the server prints."""

    url: str
    base_url: str
    port: int
    pid: int


Start = Callable[..., Ready]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start model servers with the given options; none outlives the test."""
    with ExitStack() as stack:

        def run(*options: str | int) -> Ready:
            command = [*COMMAND, *FAST, *map(str, options)]
            process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE))
            stack.callback(process.kill)
            assert process.stdout is not None
            ready: Ready = json.loads(process.stdout.readline())
            assert ready["pid"] == process.pid
            return ready

        yield run


def _chat(ready: Ready, text: str = NOTE) -> httpx.Response:
    body = {"model": "local", "messages": [{"role": "user", "content": text}]}
    return httpx.post(ready["base_url"] + "/chat/completions", json=body)


def _stats(ready: Ready) -> dict[str, int]:
    counts: dict[str, int] = httpx.get(ready["url"] + "/stats").json()
    return counts


def test_summary_and_usage_come_in_the_shape_of_openai(start: Start) -> None:
    """The answer is a chat completion whose text is taken from the note, with usage that adds up."""
    answer: dict[str, Any] = _chat(start()).json()
    assert answer["object"] == "chat.completion"
    message = answer["choices"][0]["message"]
    assert message["role"] == "assistant"
    body = message["content"].removeprefix("The mill race: ")
    assert " ".join(s for s in split_sentences(NOTE) if s in body) == body != ""
    usage = answer["usage"]
    assert usage["prompt_tokens"] > usage["completion_tokens"] > 0
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def test_embeddings_of_related_texts_are_closer(start: Start) -> None:
    """One request embeds several texts; related ones lie closer; `dimensions` is obeyed."""
    texts = ["The mill grinds grain.", "A mill for grinding of grain.", "Retry the failed request later."]
    url = start()["base_url"] + "/embeddings"
    answer = httpx.post(url, json={"model": "local", "input": texts}).json()
    mill, grain, retry = (item["embedding"] for item in answer["data"])
    assert [item["index"] for item in answer["data"]] == [0, 1, 2]
    assert len(mill) == 256
    assert cosine(mill, grain) > 0.5 > cosine(mill, retry)
    short = httpx.post(url, json={"model": "local", "input": "mill", "dimensions": 16}).json()
    assert len(short["data"][0]["embedding"]) == 16


def test_requests_over_the_limit_are_refused_with_the_time_to_wait(start: Start) -> None:
    """Of seven calls at once exactly the limit's five get through; the others learn when to come back."""
    ready = start("--requests-per-minute", 5)
    answers = [_chat(ready) for _ in range(7)]
    assert [answer.status_code for answer in answers] == [200] * 5 + [429] * 2
    assert [answer.headers["x-ratelimit-remaining-requests"] for answer in answers] == [
        "4",
        "3",
        "2",
        "1",
        "0",
        "0",
        "0",
    ]
    refused = answers[-1]
    assert 50 <= int(refused.headers["retry-after"]) <= 60
    assert refused.headers["x-ratelimit-limit-requests"] == "5"
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert refused.json()["error"]["type"] == "requests"
    counts = _stats(ready)
    assert (counts["calls"], counts["ok"], counts["status_429"], counts["max_calls_in_any_minute"]) == (7, 5, 2, 7)


def test_tokens_over_the_limit_are_refused(start: Start) -> None:
    """Tokens are limited as requests are, prompt and answer together, over both endpoints."""
    cost = _chat(start()).json()["usage"]["total_tokens"]
    ready = start("--tokens-per-minute", 2 * cost + 10)
    assert [_chat(ready).status_code for _ in range(3)] == [200, 200, 429]
    embeddings = ready["base_url"] + "/embeddings"
    assert httpx.post(embeddings, json={"model": "m", "input": "x" * 40}).status_code == 200
    refused = httpx.post(embeddings, json={"model": "m", "input": "x"})
    assert refused.status_code == 429
    assert refused.json()["error"]["type"] == "tokens"
    assert _stats(ready)["tokens"] == 2 * cost + 10


def test_a_call_over_the_limit_by_itself_is_no_throttle(start: Start) -> None:
    """What can never fit gets a 400, so that nobody waits for it, and is not charged."""
    ready = start("--tokens-per-minute", 20)
    answer = _chat(ready)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert _stats(ready)["tokens"] == 0


async def test_waiting_as_told_is_enough(start: Start) -> None:
    """After the stated wait the next call gets through: the window slides."""
    ready = start("--requests-per-minute", 2, "--window-s", 1.5)
    async with OpenAIClient(ready["base_url"], "any-key") as client:
        await client.summarize(NOTE)
        await client.embed(NOTE)
        with pytest.raises(ModelThrottled) as refused:
            await client.embed(NOTE)
        assert 0 < refused.value.retry_after_s <= 1.5
        await asyncio.sleep(refused.value.retry_after_s)
        summary, usage = await client.summarize(NOTE)
    assert summary.startswith("The mill race: ")
    assert usage.tokens_in > usage.tokens_out > 0


async def test_every_kth_call_fails_and_is_charged(start: Start) -> None:
    """Calls three and six of the seven that were let in answer 500; the client says that they may be repeated."""
    ready = start("--error-every", 3, "--requests-per-minute", 7)
    outcomes: list[str] = []
    async with OpenAIClient(ready["base_url"]) as client:
        for _ in range(8):
            try:
                vector, _ = await client.embed(NOTE)
                outcomes.append(f"ok {len(vector)}")
            except ModelThrottled:
                outcomes.append("throttled")
            except ModelError as error:
                outcomes.append(f"{error.status} {error.retryable}")
    failed = "500 True"
    assert outcomes == ["ok 256", "ok 256", failed, "ok 256", "ok 256", failed, "ok 256", "throttled"]
    counts = _stats(ready)
    assert (counts["ok"], counts["status_500"], counts["status_429"]) == (5, 2, 1)


async def test_calls_side_by_side_are_all_counted(start: Start) -> None:
    """Of thirty concurrent calls exactly the limit gets through."""
    ready = start("--requests-per-minute", 20)
    async with OpenAIClient(ready["base_url"]) as client:
        outcomes = await asyncio.gather(*(client.embed(NOTE) for _ in range(30)), return_exceptions=True)
    assert sum(isinstance(outcome, tuple) for outcome in outcomes) == 20
    assert sum(isinstance(outcome, ModelThrottled) for outcome in outcomes) == 10
    assert _stats(ready)["max_calls_in_any_minute"] == _stats(ready)["calls"] == 30


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"\xff", b"{}", b'{"model":"m","messages":[]}', b'{"model":1,"messages":[]}', b"[" * 100_000],
    ids=["empty", "list", "not-utf8", "no-fields", "no-message", "wrong-type", "deep"],
)
def test_a_request_that_does_not_fit_is_the_callers_fault(start: Start, body: bytes) -> None:
    """Bad input answers 400 in OpenAI's shape; it counts as a call, is not charged, and the next call is served."""
    ready = start("--requests-per-minute", 1)
    answer = httpx.post(ready["base_url"] + "/chat/completions", content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert _chat(ready).status_code == 200
    assert _stats(ready)["status_400"] == 1


async def test_the_client_tells_an_absent_server_from_a_wrong_answer(start: Start) -> None:
    """No answer is status 0 and may be repeated; a path that the server lacks is 404 and may not."""
    ready = start()
    async with OpenAIClient(ready["url"]) as client:
        with pytest.raises(ModelError) as wrong:
            await client.embed("text")
    assert (wrong.value.status, wrong.value.retryable) == (404, False)
    os.kill(ready["pid"], signal.SIGKILL)
    async with OpenAIClient(ready["base_url"], timeout_s=5) as client:
        with pytest.raises(ModelError) as absent:
            await client.embed("text")
    assert (absent.value.status, absent.value.retryable) == (0, True)


async def test_the_client_refuses_answers_that_do_not_fit() -> None:
    """A 200 with another body is an error of the endpoint, and a spent quota is no throttle."""
    bodies = [
        httpx.Response(200, json={"choices": []}),
        httpx.Response(200, content=b"<html>"),
        httpx.Response(429, json={"error": {"message": "pay first", "code": "insufficient_quota"}}),
        httpx.Response(503, content=b"busy"),
    ]
    async with httpx.AsyncClient(transport=httpx.MockTransport(lambda _: bodies.pop(0))) as http:
        client = OpenAIClient("http://model.test/v1/", http=http)
        for status in (502, 502, 429, 503):
            with pytest.raises(ModelError) as error:
                await client.summarize("text")
            assert error.value.status == status


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, 1.0),
        ({"retry-after": "20"}, 20.0),
        ({"retry-after": "20", "retry-after-ms": "1500"}, 1.5),
        ({"retry-after": "-3"}, 0.0),
        ({"retry-after": "1e9"}, 86_400.0),
        ({"retry-after": "nan"}, 1.0),
        ({"retry-after": "soon"}, 1.0),
        ({"retry-after": "Mon, 30 Nov 2026 10:00:30 GMT", "date": "Mon, 30 Nov 2026 10:00:00 GMT"}, 30.0),
    ],
)
def test_retry_after_is_read_in_every_form(headers: dict[str, str], seconds: float) -> None:
    """Seconds, milliseconds and dates are understood, nonsense is a second, and a day is the most."""
    assert retry_after_s(httpx.Headers(headers)) == seconds


def test_sigterm_ends_the_server_and_leaves_its_counts(start: Start, tmp_path: Path) -> None:
    """The port file names the server while it runs; the stats file has what it counted once it has ended."""
    ready = start("--port-file", tmp_path / "port.json", "--stats-file", tmp_path / "stats.json")
    _chat(ready)
    assert json.loads((tmp_path / "port.json").read_text()) == ready
    os.kill(ready["pid"], signal.SIGTERM)
    wait_until_sync((tmp_path / "stats.json").exists, "the server wrote its counts")
    assert json.loads((tmp_path / "stats.json").read_text())["ok"] == 1


def test_server_ends_when_its_parent_is_killed() -> None:
    """A parent that is killed without a chance to clean up takes its model server along."""
    script = "import subprocess, sys; subprocess.run(sys.argv[1:])"
    with subprocess.Popen([sys.executable, "-c", script, *COMMAND], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        ready: Ready = json.loads(parent.stdout.readline())
        assert _stats(ready)["calls"] == 0
        parent.kill()
        wait_until_sync(lambda: not _answers(ready), "the orphan is gone")


def _answers(ready: Ready) -> bool:
    try:
        return bool(_stats(ready))
    except httpx.HTTPError:
        return False


@given(st.lists(st.tuples(st.floats(0, 30), st.integers(1, 4)), max_size=60), st.integers(1, 12))
def test_no_window_ever_holds_more_than_the_limit(calls: list[tuple[float, int]], limit: int) -> None:
    """Whatever arrives when, no half-open window holds more than the limit, and the stated wait is exact."""
    window = SlidingWindow(limit, 60.0)
    taken: list[tuple[float, int]] = []
    now = 0.0
    for gap_s, cost in calls:
        now += gap_s
        wait_s = window.wait_s(now, cost)
        inside = sum(units for at, units in taken if at + 60.0 > now)
        assert (wait_s == 0.0) == (inside + cost <= limit)
        if wait_s == 0.0:
            window.take(now, cost)
            taken.append((now, cost))
        elif cost <= limit:
            later = now + wait_s
            assert sum(units for at, units in taken if at + 60.0 > later + 1e-6) + cost <= limit
            assert sum(units for at, units in taken if at + 60.0 > later - 1e-6) + cost > limit


@given(st.lists(st.floats(0, 40), max_size=80))
def test_the_fullest_minute_is_found_exactly(gaps_s: list[float]) -> None:
    """The count over all half-open minutes equals a count by brute force."""
    stats = Stats()
    arrivals: list[float] = []
    for gap_s in gaps_s:
        arrivals.append(arrivals[-1] + gap_s if arrivals else gap_s)
        stats.arrived(arrivals[-1])
    fullest = max((sum(1 for other in arrivals if at >= other and other + 60.0 > at) for at in arrivals), default=0)
    assert stats.max_calls_in_any_minute == fullest
