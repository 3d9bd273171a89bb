"""Is joined into commit_log.py; goes once nobody imports it."""

from diloco_cli.protocol.log.commit_log import *  # noqa: F403
