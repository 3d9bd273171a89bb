"""Processes of this machine: who they are, whether they live, and what a run keeps about them on disk."""
