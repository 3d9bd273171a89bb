"""The protocol as pure code: records, keys, the commit log, quorum and grace, weights, syncer and learner.

No torch, no clock, no I/O of its own: what must touch the world is a generator that yields operations
(`log/operations.py`), which a driver performs: on a real store, or in a simulated one.
"""
