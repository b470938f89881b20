"""The worker: one execution per slot."""

from millstream.worker.actor import Worker

__all__ = ["Worker"]
