"""The syncer daemon: protocol + algorithm + store + clock."""
