"""Seeded worst cases: whole runs of the protocol's own code in virtual time, under faults, checked after every step.

Only clock, store, processes and the payloads' arithmetic are replaced. A seed draws a run and the faults that are on;
`history.py` simulates it, `monitor.py` checks every write, `replayer.py` reads the bucket with books of its own.
"""
