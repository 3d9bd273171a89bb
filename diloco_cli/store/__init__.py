"""The object-store port and its implementations."""
