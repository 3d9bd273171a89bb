"""The syncer daemon (protocol, arithmetic, store and clock), and what an operator asks of it."""
