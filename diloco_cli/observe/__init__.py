"""Judging a run by its bucket: status and its text, verify's replay and books, lost versions computed anew."""
