"""The training process of one island: a readable loop, and the exchange behind it."""
