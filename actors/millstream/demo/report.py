"""The figures of a run, read from the tracker and the provider, and whether they add up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import httpx
import msgspec

from millstream.demo.notes import EMBED, RELATE, SUMMARIZE, Relation
from millstream.demo.provider import Calls
from millstream_schemas.lifecycle import TERMINAL

PAGE = 200
SHORTEST_S = 65.0
"""A run at the default limit is longer than the minute that the limit is about."""
HELD_S = 0.5
"""A task that is held for a shorter time has not waited for the limit, only for its release."""
_NOT_FOUND = 404


class ErrorShown(msgspec.Struct, frozen=True):
    """Why a task failed."""

    reason: str = ""
    type: str = ""
    message: str = ""


class TaskShown(msgspec.Struct, frozen=True):
    """The part of a task in `GET /v1/tasks` that the demo reads."""

    key: str
    task_type: str
    state: str
    title: str = ""
    attempt: int = 1
    throttles: int = 0
    held_s: float = 0.0
    error: ErrorShown | None = None

    @property
    def waits(self) -> int:
        """How often the limit put the task off: each time that a worker parked it, and once if it was held for a while."""
        return self.throttles + (self.held_s >= HELD_S)

    @property
    def over(self) -> bool:
        """Whether the task has its outcome."""
        return self.state in TERMINAL


class RelatedNote(msgspec.Struct, frozen=True):
    """One note that another is close to."""

    title: str
    score: float


class NoteShown(msgspec.Struct, frozen=True):
    """One note at the end of the run."""

    title: str
    path: str
    summary: str
    related: list[RelatedNote]


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a run; as JSON, with these names in this order. Every task counts, those that follow others too."""

    submitted: int
    completed: int
    failed: int
    retried: int
    throttled: int
    provider_calls: int
    provider_429: int
    limit_per_minute: int
    max_calls_in_any_minute: int
    elapsed_s: float
    notes: list[NoteShown]


class _Page(msgspec.Struct, frozen=True):
    items: list[TaskShown]
    next: str | None = None


class _Whole(msgspec.Struct, frozen=True):
    result: Relation


class Reader:
    """Reads one run from the tracker. Raises httpx.HTTPError where it does not answer."""

    def __init__(self, http: httpx.AsyncClient, run_id: str) -> None:
        self._http = http
        self._run_id = run_id

    async def tasks(self) -> list[TaskShown]:
        """All tasks of the run."""
        found: list[TaskShown] = []
        query = {"run_id": self._run_id, "limit": str(PAGE)}
        while True:
            page = msgspec.json.decode(await self._get("/v1/tasks", query), type=_Page)
            found += page.items
            if not page.next:
                return found
            query["cursor"] = page.next

    async def without_letter(self, tasks: Iterable[TaskShown]) -> list[str]:
        """The titles of failed tasks that the dead-letter queue does not hold."""
        failed = [task for task in tasks if task.state == "failed"]
        answers = [await self._http.get(f"/v1/dlq/{task.key}") for task in failed]
        return [task.title for task, answer in zip(failed, answers, strict=True) if answer.status_code == _NOT_FOUND]

    async def notes(self, tasks: Iterable[TaskShown]) -> list[NoteShown]:
        """The notes whose chain is complete, by path, from the results of their last tasks."""
        relations: list[Relation] = []
        for task in tasks:
            if task.task_type == RELATE and task.state == "completed":
                answer = await self._get(f"/v1/tasks/{task.key}", {})
                relations.append(msgspec.json.decode(answer, type=_Whole).result)
        return mutual(relations)

    async def _get(self, path: str, query: dict[str, str]) -> bytes:
        answer = await self._http.get(path, params=query)
        answer.raise_for_status()
        return answer.content


def mutual(relations: Sequence[Relation]) -> list[NoteShown]:
    """The notes with their relations both ways: the first to be related could not know those that came later."""
    by_path = {relation.path: relation for relation in relations}
    related: dict[str, dict[str, float]] = {path: {} for path in by_path}
    for relation in relations:
        for other in relation.related:
            related[relation.path][other.path] = other.score
            if other.path in related:
                related[other.path][relation.path] = other.score
    titles = {other.path: other.title for relation in relations for other in relation.related}
    titles |= {path: relation.title for path, relation in by_path.items()}
    return [
        NoteShown(relation.title, path, relation.summary, _closest(related[path], titles))
        for path, relation in sorted(by_path.items())
    ]


def _closest(scores: dict[str, float], titles: dict[str, str]) -> list[RelatedNote]:
    ordered = sorted(scores.items(), key=lambda item: -item[1])
    return [RelatedNote(titles[path], score) for path, score in ordered[:3]]


def complete(tasks: Sequence[TaskShown], submitted: int) -> bool:
    """Whether nothing is left to come: all tasks are over, and each completed one has its successor."""
    count = Counter(task.task_type for task in tasks)
    done = Counter(task.task_type for task in tasks if task.state == "completed")
    chained = count[EMBED] >= done[SUMMARIZE] and count[RELATE] >= done[EMBED]
    return count[SUMMARIZE] >= submitted and chained and all(task.over for task in tasks)


def figures(
    tasks: Sequence[TaskShown], calls: Calls, notes: list[NoteShown], *, limit_per_minute: int, elapsed_s: float
) -> Figures:
    """Sum up a run."""
    completed = sum(task.state == "completed" for task in tasks)
    return Figures(
        submitted=len(tasks),
        completed=completed,
        failed=sum(task.over for task in tasks) - completed,
        retried=sum(task.attempt - 1 for task in tasks),
        throttled=sum(task.waits for task in tasks),
        provider_calls=calls.calls,
        provider_429=calls.status_429,
        limit_per_minute=limit_per_minute,
        max_calls_in_any_minute=calls.max_calls_in_any_minute,
        elapsed_s=round(elapsed_s, 1),
        notes=notes,
    )


def problems(found: Figures, unburied: Sequence[str], *, whole: bool, paced: bool, flaky: bool) -> list[str]:
    """What is wrong with a run, in plain words; nothing where all is well.

    `whole`: nothing is left to come. `paced`: the limit is the default one, under which the calls have to wait.
    `flaky`: the model answers 500 now and then, as the local one does.
    """
    said: list[str] = []
    if found.submitted != found.completed + found.failed:
        said.append(f"{found.submitted - found.completed - found.failed} of {found.submitted} tasks have no outcome")
    if not whole:
        said.append("the run did not end within its time limit: some tasks, or their successors, are still to come")
    if found.max_calls_in_any_minute > found.limit_per_minute:
        said.append(
            f"the provider saw {found.max_calls_in_any_minute} calls in one minute, "
            f"the limit is {found.limit_per_minute}"
        )
    if unburied:
        said.append(f"failed, but not in the dead-letter queue: {', '.join(unburied)}")
    if found.failed < 1:
        said.append("no task failed, though one file cannot be read")
    borne = 0 if flaky else found.provider_calls // 100  # the local model's limit is the configured one, to the call
    if found.provider_429 > borne:
        said.append(f"the provider refused {found.provider_429} of {found.provider_calls} calls with 429")
    return said + (_unproven(found, flaky=flaky) if paced else [])


def _unproven(found: Figures, *, flaky: bool) -> list[str]:
    """What the run was made to show, and did not."""
    said: list[str] = []
    if found.elapsed_s < SHORTEST_S:
        said.append(f"the run took {found.elapsed_s} s: under {SHORTEST_S:.0f} s the limit is not seen at work")
    if found.provider_calls <= found.limit_per_minute:
        said.append(f"only {found.provider_calls} calls were made: a minute allows {found.limit_per_minute}")
    if flaky and found.retried < 1:
        said.append("no task was retried, though the model fails now and then")
    if found.throttled < 1:
        said.append("no task waited for the limit")
    return said
