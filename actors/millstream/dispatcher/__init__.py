"""The dispatcher: decides what happens next to a task."""

from millstream.dispatcher.actor import Dispatcher

__all__ = ["Dispatcher"]
