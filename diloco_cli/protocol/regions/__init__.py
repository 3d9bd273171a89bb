"""Buckets of regions: what copies the log there and offers home. A run without any needs none of this."""
