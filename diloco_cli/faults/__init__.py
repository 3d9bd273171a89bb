"""Scenarios of faults, and their seeded timetables. Pure."""
