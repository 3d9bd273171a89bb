"""What a run was, for people who were not there: its log, read and drawn, as one page, a picture or a table."""
