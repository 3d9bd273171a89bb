"""The state machines that meet in the bucket: learner, syncer, standby, operators; they yield operations."""
