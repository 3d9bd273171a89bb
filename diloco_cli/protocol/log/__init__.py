"""The log: its records, their bytes and keys, reading and appending it, and what it says once it is folded."""
