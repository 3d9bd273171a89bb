"""The newest committed parameters as files: for torch, and as a folder that Hugging Face transformers loads."""
