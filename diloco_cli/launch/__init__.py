"""A run made from a plan, and its units chosen and started on this machine."""
