"""Observation of a run: facts read from the bucket, status derived from them, text for people."""
