"""Is joined into records.py; goes once nobody imports it."""

from diloco_cli.protocol.log.records import *  # noqa: F403
