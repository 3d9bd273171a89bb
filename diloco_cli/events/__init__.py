"""What happened, for people: events of units, of the log and of chaos. No decision depends on one."""
