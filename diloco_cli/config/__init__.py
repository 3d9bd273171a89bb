"""Users' files: run.yaml and inventory.yaml, read strictly, every error with file and line."""
