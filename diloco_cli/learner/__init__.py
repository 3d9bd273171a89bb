"""The training process of one island: what protocol/actors/learner.py needs of torch, threads and the network."""
