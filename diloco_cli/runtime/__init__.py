"""Processes on this machine: what performs operations on a store, who a process is, and what keeps units alive."""
