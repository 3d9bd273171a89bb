"""What can go wrong, in one vocabulary for `chaos` and `simulate`: scenarios and their seeded timetables. Pure."""
