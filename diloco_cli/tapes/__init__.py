"""Tapes: a run's trajectory without its timing; played, recorded, written and read."""
