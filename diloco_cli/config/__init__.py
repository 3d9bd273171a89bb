"""What users write: run.yaml and inventory.yaml, strictly read, every error with file and line."""
