"""Which outcome an answer of OpenAI, Anthropic, Gemini or Azure OpenAI is, by one table."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from millstream.providers.limits_seen import observed
from millstream.providers.reading import Answer, Read, mapping, objects, read
from millstream.providers.usage import Usage, usage
from millstream.providers.waits import retry_after_s
from millstream_schemas.permits import Observed, OutcomeClass

MAX_DETAIL = 300
"""Characters of `detail`."""


@dataclass(frozen=True, slots=True)
class Classified:
    """What an answer says: how the call ended, how long to wait, the limits it shows, what it used.

    `retry_after_s` is within a day and None where nothing sensible was said; `detail` is for people.
    """

    outcome: OutcomeClass
    retry_after_s: float | None = None
    observed: tuple[Observed, ...] = ()
    detail: str = ""
    usage: Usage | None = None


@dataclass(frozen=True, slots=True)
class Rule:
    """One row: an answer with one of `statuses` (none: any error) and one of the signs is `outcome`.

    Signs are `names` (the error's type, code or status, in lower case), `texts` (parts of its message, in lower case),
    `quotas` (parts of the names of the quotas that failed) and `no_retry` (`x-should-retry: false`). A row without signs
    goes by the status alone.
    """

    outcome: OutcomeClass
    statuses: frozenset[int] = frozenset()
    names: frozenset[str] = frozenset()
    texts: tuple[str, ...] = ()
    quotas: tuple[str, ...] = ()
    no_retry: bool = False


RULES = (
    Rule("quota", statuses=frozenset({402})),
    Rule(
        "quota",
        names=frozenset(
            {
                "insufficient_quota",
                "credit_balance_exhausted",
                "organization_spend_limit_exceeded",
                "project_spend_limit_exceeded",
                "organization_usage_limit_exceeded",
                "enforced_spend_limit_reached",
                "billing_hard_limit_reached",
                "billing_not_active",
                "billing_error",
                "quota_exceeded",
            }
        ),
        texts=("credit balance is too low", "specified api usage limit", "specified workspace api usage limit"),
    ),
    Rule("quota", statuses=frozenset({403, 429}), texts=("out of call volume quota",)),
    Rule("quota", statuses=frozenset({429}), texts=("limit: 0,",), quotas=("perday", "per_day", "per day")),
    Rule("too_large", statuses=frozenset({429}), texts=("request too large",), no_retry=True),
    Rule(
        "ramp",
        statuses=frozenset({429, 503}),
        names=frozenset({"slow_down"}),
        texts=("acceleration limit", "more gradually", "temporary rate limit adjustment"),
    ),
    Rule("overloaded", names=frozenset({"overloaded_error", "server_is_overloaded", "engine_overloaded"})),
    Rule("overloaded", statuses=frozenset({429}), texts=("high demand", "currently overloaded")),
    Rule("overloaded", statuses=frozenset({503, 529})),
    Rule("throttled", statuses=frozenset({429})),
    Rule("fault", statuses=frozenset({408, *range(500, 1000)})),
    Rule("client"),
)
"""The first row that fits says what an answer of 400 or above is."""

_SPACE = re.compile(r"\s+")


def classify(response: Answer | BaseException | object) -> Classified:
    """What an answer says, or an exception that carries one as `.response`; never raises, reads no stream.

    Without a status it is `unknown`: nothing came back that says whether the call was done.
    """
    answer = read(response)
    if answer.status is None:
        return Classified("unknown", detail=_shortened(repr(response)))
    if answer.status < 400:
        return Classified("ok", observed=observed(answer.headers), usage=usage(answer))
    rule = next(rule for rule in RULES if _fits(rule, answer))
    return Classified(
        rule.outcome,
        retry_after_s=None if rule.outcome in ("client", "too_large") else retry_after_s(answer),
        observed=observed(answer.headers),
        detail=_detail(answer),
    )


def _fits(rule: Rule, answer: Read) -> bool:
    if rule.statuses and answer.status not in rule.statuses:
        return False
    if not (rule.names or rule.texts or rule.quotas or rule.no_retry):
        return True
    message = f"{answer.error.get('message', '')} {answer.text[:4096]}".lower()
    return (
        any(name in rule.names for name in _names(answer))
        or any(text in message for text in rule.texts)
        or any(part in quota for part in rule.quotas for quota in _quotas(answer))
        or (rule.no_retry and answer.headers.get("x-should-retry", "").strip().lower() == "false")
    )


def _names(answer: Read) -> Iterator[str]:
    error = answer.error
    for value in (error.get("code"), error.get("type"), error.get("status")):
        if isinstance(value, str):
            yield value.lower()
    for part in (mapping(error.get("details")), mapping(error.get("innererror")), *objects(error.get("details"))):
        for name in ("error_code", "code", "reason"):
            if isinstance(part.get(name), str):
                yield str(part[name]).lower()


def _quotas(answer: Read) -> Iterator[str]:
    """The names of the quotas that a Gemini answer says have failed, in lower case."""
    for detail in objects(answer.error.get("details")):
        if str(detail.get("@type", "")).endswith("QuotaFailure"):
            for violation in objects(detail.get("violations")):
                yield " ".join(
                    str(violation.get(name, "")) for name in ("quotaId", "quotaMetric", "subject", "description")
                ).lower()


def _detail(answer: Read) -> str:
    names = [name for name in _names(answer) if name != str(answer.status)]
    message = answer.error.get("message") or answer.text[:MAX_DETAIL]
    return _shortened(": ".join(str(part) for part in (answer.status, *names[:1], message) if part))


def _shortened(text: str) -> str:
    text = _SPACE.sub(" ", text).strip()
    return text if len(text) <= MAX_DETAIL else text[: MAX_DETAIL - 1] + "…"
