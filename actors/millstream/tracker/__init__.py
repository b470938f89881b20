"""The tracker: folds the events of all tasks into a read model and shows it; it owns nothing and can be rebuilt."""

from millstream.tracker.actor import Tracker

__all__ = ["Tracker"]
