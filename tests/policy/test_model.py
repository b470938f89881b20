"""The chain's promises, in every interleaving of its actors with faults, asked of the real policy functions.

One fault by default; MILLSTREAM_MODEL_FAULTS=2 (make faults) explores two.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace

import pytest

from millstream.policy import admit, claim, control, decide, release, ticks
from tests.policy.model.explore import Report, Scenario, TooManyStates, explore
from tests.policy.model.mutants import mutant
from tests.policy.model.rules import Policy

FAULTS = int(os.environ.get("MILLSTREAM_MODEL_FAULTS", "1"))

WIDE = FAULTS < 2
"""With one fault everything is explored as it is. With two, a cancel's purge forgets its bound, which leaves out the states
between its look at WORK and its look at the task, and the parked task has one worker: millions of states less."""

RETRIES = Scenario(outcomes=("completed", "error"), faults=FAULTS, purge_all=not WIDE)
"""Two attempts: completed, or failed twice and dead-lettered; a canceller comes at any moment."""

HANDED_BACK = Scenario(outcomes=("completed", "interrupted"), faults=FAULTS, purge_all=not WIDE)
"""A stopping worker hands back, with or without a claim, or not knowing whether it has one."""

PARKED = Scenario(outcomes=("completed", "parked"), faults=FAULTS, workers=2 if WIDE else 1, purge_all=not WIDE)
"""A throttled task comes back by a schedule."""

DELAYED = Scenario(outcomes=("fatal", "cancelled"), faults=FAULTS, delay_s=5.0, purge_all=not WIDE)
"""The first release is a schedule; the handler ends the task for good."""

SUBMITTED_TWICE = Scenario(
    outcomes=("completed", "fatal"), faults=FAULTS, submits=2, unique="in_flight", workers=1, cancels=False
)
"""Two submits of one key that is free again once the task is over: two generations, or one."""

CANCELLED_BETWEEN = replace(SUBMITTED_TWICE, dispatchers=1, cancels=True)
"""The canceller meets either generation."""

# What is held: one dispatcher and one worker where more of them add nothing to what the plain scenarios show, for every
# entry that waits for a releaser multiplies the states.

HELD = Scenario(outcomes=("completed",), faults=FAULTS, metered=True, workers=1, releasers=2, purge_all=not WIDE)
"""Two releasers, one of which does not know yet that it was replaced."""

_ONE_EACH = replace(HELD, dispatchers=1, releasers=1)

HELD_HANDED_BACK = replace(_ONE_EACH, outcomes=("completed", "interrupted"))
"""What a stopping worker hands back is held again at once."""

HELD_RETRIES = replace(_ONE_EACH, outcomes=("completed", "error"), cancels=False)
"""A retry is held again when it is due."""

HELD_PARKED = replace(_ONE_EACH, outcomes=("completed", "parked"), cancels=WIDE)
"""And so is a throttled task."""

HELD_WHEN_DUE = replace(HELD, delay_s=5.0, releasers=1)
"""Two dispatchers and the timer of a delayed task."""

HELD_TO_DEADLINE = replace(_ONE_EACH, deadline=True)
"""The deadline passes, before a releaser comes to the entry or after, by the timer or by the releaser's own look."""

HELD_TOO_LONG = replace(HELD, dispatchers=1, too_long=True)
"""A releaser ends what has waited for as long as it may."""

HELD_TWICE = replace(
    _ONE_EACH, outcomes=("completed", "fatal"), submits=2, unique="in_flight", cancels=False, purge_all=False
)
"""Two generations in one lane."""

HELD_TWICE_TOO_LONG = replace(HELD_TWICE, too_long=True, outcomes=("completed",))
"""The second begins while the dead letter of the first, which had waited for too long, is not there yet."""

SCENARIOS = {
    "retries": RETRIES,
    "handed back": HANDED_BACK,
    "parked": PARKED,
    "delayed": DELAYED,
    "submitted twice": SUBMITTED_TWICE,
    "cancelled between generations": CANCELLED_BETWEEN,
    "held": HELD,
    "held, handed back": HELD_HANDED_BACK,
    "held, retries": HELD_RETRIES,
    "held, parked": HELD_PARKED,
    "held when due": HELD_WHEN_DUE,
    "held to the deadline": HELD_TO_DEADLINE,
    "held too long": HELD_TOO_LONG,
    "held twice": HELD_TWICE,
    "held twice, too long": HELD_TWICE_TOO_LONG,
}


def _explored(scenario: Scenario) -> Report:
    """The report, shown with the test's output as well: `pytest -rP` prints states and seconds."""
    report = explore(scenario)
    sys.stdout.write(f"{report}\n")
    return report


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SCENARIOS)
def test_every_interleaving_keeps_the_promises(name: str) -> None:
    """One outcome at the most and one in the end, no start too many, nobody stuck, nothing redelivered for ever."""
    report = _explored(SCENARIOS[name])
    assert not report.violations, str(report)


def test_an_exploration_is_never_cut_off_silently() -> None:
    """A bound that is met fails: what was not visited is not proven."""
    with pytest.raises(TooManyStates):
        explore(replace(RETRIES, faults=0, bound=100))


# --- the model can fail: one rule changed, and it says which promise breaks and how -------------------------------------


def _claims(old: str, new: str) -> Policy:
    changed = mutant(claim, old, new)
    return Policy(
        first_claim=changed.first_claim, claim=changed.claim, commit=changed.commit, hand_back=changed.hand_back
    )


STARTS, STUCK_WORK, STUCK_TASK = "more starts", "a message is left in work", "an accepted task has no outcome"
UNRELEASED = "that no releaser has let go"
NO_LETTER, TWICE, LIE = "a failed task has no dead letter", "acted twice", "a worker was told"

_RETRIES = replace(RETRIES, faults=1, purge_all=True)
_HANDED_BACK = replace(HANDED_BACK, faults=1, purge_all=True)
_HELD, _HELD_BACK = replace(HELD, faults=1), replace(HELD_HANDED_BACK, faults=1)
_DUE, _DEADLINE = replace(HELD_WHEN_DUE, faults=1), replace(HELD_TO_DEADLINE, faults=0)
_TWICE, _BETWEEN = replace(SUBMITTED_TWICE, faults=1), replace(CANCELLED_BETWEEN, faults=1)

MUTANTS: dict[str, tuple[Scenario, Policy, str]] = {
    "a delivery of the same number takes over": (
        _RETRIES,
        _claims("card.delivery >= hold.delivery", "card.delivery > hold.delivery"),
        STARTS,
    ),
    "a copy of the work message takes over": (
        _RETRIES,
        _claims("card.release != hold.item.fence or card.work_seq != hold.work_seq", "card.release != hold.item.fence"),
        STARTS,
    ),
    "a newer delivery never takes over": (
        _RETRIES,
        _claims("if card.delivery >= hold.delivery:", "if card.delivery:"),
        "redelivered without end",
    ),
    "a fenced execution acks its successor's message": (
        replace(HANDED_BACK, outcomes=("completed",), cancels=False, faults=2),
        _claims(
            "release == hold.item.fence:\n        return Silence()",
            "release == hold.item.fence:\n        return Superseded()",
        ),
        STUCK_TASK,
    ),
    "a worker that hands back forgets a claim that was not answered": (
        _HANDED_BACK,
        _claims("if isinstance(last, Started) or last.card", "if last.card"),
        LIE,
    ),
    "a worker takes the card of a cancel for its own outcome": (
        _RETRIES,
        _claims("return by_delivery != isinstance(last, Failed | Expired)", "return True"),
        LIE,
    ),
    "a submit whose event stands is acked without its work message": (
        _RETRIES,
        Policy(standing=mutant(admit, "return GoOn(last_seq, last)", "return Done()").standing),
        STUCK_TASK,
    ),
    "a submit opens a generation although it was accepted before the end of the last": (
        _TWICE,
        Policy(standing=mutant(admit, " and last_at <= admission.accepted_at", "").standing),
        TWICE,
    ),
    "a decision that stands is not followed": (
        _RETRIES,
        Policy(decided=mutant(decide, "return GoOn(last, last_seq)", "return Done()").decided),
        STUCK_TASK,
    ),
    "a dead letter is forgotten once a new generation has begun": (
        _TWICE,
        Policy(
            decided=mutant(
                decide, "return owed(Cause(stream=seen.stream, seq=seen.seq), past)", "return Done()"
            ).decided
        ),
        NO_LETTER,
    ),
    "a cancel comes too late and is appended": (
        _RETRIES,
        Policy(cancel=mutant(control, "__struct_config__.tag in TERMINAL_KINDS:", "card.generation > 9:").cancel),
        "not in the life cycle",
    ),
    "a cancel is carried out on a later generation too": (
        _BETWEEN,
        Policy(
            cancel=mutant(control, "return any(event.card.cause == cause for event in past)", "return False").cancel
        ),
        TWICE,
    ),
    "a submit whose task is held is acked without its entry": (
        _HELD,
        Policy(
            standing=mutant(admit, "isinstance(last, Queued | Held | Scheduled)", "isinstance(last, Queued)").standing
        ),
        STUCK_TASK,
    ),
    "interrupted work goes past the releaser": (
        _HELD_BACK,
        Policy(
            decide=mutant(
                decide, "return held(card, item.lane, item.limits, again=True) if item.lane else", "return"
            ).decide
        ),
        UNRELEASED,
    ),
    "a tick whose event stands is acked without its entry": (
        _DUE,
        Policy(hold=mutant(ticks, "return GoOn(last, last_seq)", "return Done()").hold),
        STUCK_TASK,
    ),
    "a tick gives up where its event was not stored": (
        _DUE,
        Policy(hold=mutant(ticks, "        return first_hold(item, cause)", "        return Done()").hold),
        STUCK_TASK,
    ),
    "a deadline ends a task that was released": (
        _DEADLINE,
        Policy(expire=mutant(ticks, "not isinstance(last, Held) or last_seq != deadline.fence", "last is None").expire),
        "a deadline ends a task that is not held",
    ),
    "a releaser removes an entry whose event stands, and publishes nothing": (
        _HELD,
        Policy(entry=mutant(release, "return GoOn(last, last_seq)", "return Remove()").standing),
        STUCK_TASK,
    ),
    "a releaser removes an entry whose event was not stored": (
        _HELD,
        Policy(entry=mutant(release, "return Append(wanted, last_seq)", "return Remove()").standing),
        STUCK_TASK,
    ),
    "a releaser forgets a dead letter once a new generation has begun": (
        replace(HELD_TWICE_TOO_LONG, faults=1),
        Policy(entry=mutant(release, "owed = decide.owed(entry.cause, past)", "owed = decide.Done()").standing),
        NO_LETTER,
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_model_notices_a_changed_rule(name: str) -> None:
    """Each rule is there because some interleaving needs it; without it the model shows that interleaving."""
    scenario, policy, expected = MUTANTS[name]
    report = _explored(replace(scenario, policy=policy, stop_at_first=expected))
    assert any(expected in violation for violation in report.violations), str(report)


def test_a_purge_without_bound_takes_the_work_of_the_next_generation() -> None:
    """Why a cancel notes the end of WORK before it reads the last event, and purges no further."""
    report = _explored(replace(CANCELLED_BETWEEN, faults=0, purge_all=True))
    assert any(STUCK_TASK in violation for violation in report.violations), str(report)


def test_a_releaser_that_removes_an_entry_first_loses_the_task() -> None:
    """Why the order is event, publish, remove: a crash between any two of them leaves something to go on with."""
    report = _explored(replace(HELD, faults=1, remove_first=True, stop_at_first=STUCK_TASK))
    assert any(STUCK_TASK in violation for violation in report.violations), str(report)
