"""Is joined into merging.py; goes once nobody imports it."""

from diloco_cli.protocol.rules.merging import *  # noqa: F403
