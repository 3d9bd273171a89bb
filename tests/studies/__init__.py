"""Whole runs of real processes under faults; what is too long for every push runs there as a sample."""
