"""Processes on this machine: performing operations on a store, identifying processes, keeping units alive."""
