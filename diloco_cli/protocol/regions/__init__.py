"""Buckets of regions: mirrors copy the log there, relays copy offers home. Runs with one bucket do not use this."""
