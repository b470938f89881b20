"""What the governor's core answers to one message or to the passing of time."""

import msgspec

from millstream.policy.holdings import Effect
from millstream.policy.waiters import Answer
from millstream_schemas.permits import PermitReply


class Verdict(msgspec.Struct, frozen=True, gc=False):
    """What to send and do now, and when to call `due` next (None: nothing waits for time to pass).

    `reply` answers the message itself; None means that it is held, or that there was no message. `effects` come before
    the reply: what was spent must be durable before anybody hears of it.
    """

    reply: PermitReply | None
    answers: tuple[Answer, ...]
    wake_at: float | None
    effects: tuple[Effect, ...] = ()
