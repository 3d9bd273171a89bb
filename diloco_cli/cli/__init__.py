"""One file a command: parse, call, render. No decision lives here."""
