"""A run's island inside its owner's own training loop: `from diloco_cli import join`."""
