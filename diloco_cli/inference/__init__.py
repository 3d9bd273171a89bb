"""The newest committed parameters at work: text that they write, and what they are worth on tasks."""
