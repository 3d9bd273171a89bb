"""Starting the units of a run on this machine, and keeping them alive until the run ends."""
