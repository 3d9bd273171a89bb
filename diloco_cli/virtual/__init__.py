"""A world in virtual time: actors, their calls to a store, and the faults of these calls."""
