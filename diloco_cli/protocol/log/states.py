"""Is joined into state.py; goes once nobody imports it."""

from diloco_cli.protocol.log.state import *  # noqa: F403
