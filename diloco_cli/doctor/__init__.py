"""Proves that a store keeps the promises that a run rests on, before a run trusts it."""
