"""Decisions: pure functions of facts and settings, with a reason in words."""
