"""The methods that the experiments compare: schedules, fleets in virtual time that follow them, and trials of them."""
