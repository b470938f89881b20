"""An explicit-state model of the chain: every interleaving of a task's actors, with faults, on the real policy functions."""
