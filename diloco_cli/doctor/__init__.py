"""Checks that a store keeps the guarantees that a run depends on, before a run uses it."""
