"""Decoupled DiLoCo: learners and a syncer that only meet in a bucket."""

__version__ = "0.4.0.dev0"
