"""A world in virtual time: actors, their calls of a store, and what goes wrong with them."""
