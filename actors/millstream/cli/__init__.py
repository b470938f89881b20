"""The command line."""

from millstream.cli.root import main

__all__ = ["main"]
