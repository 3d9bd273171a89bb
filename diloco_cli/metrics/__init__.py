"""A run's figures for other systems: OpenMetrics text, and Weights & Biases; fed from the bucket alone."""
