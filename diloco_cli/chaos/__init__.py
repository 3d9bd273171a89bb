"""Breaking a run on purpose: only its own units, on the record, and always healed."""
