"""The system in virtual time: goodput of a failing fleet, bandwidth, whole runs. It predicts and never trains."""
