"""From an inventory and a run to islands, a schedule, predictions. Pure: no torch, no clock, no network."""
