"""The model of one island and its inner steps: `Training` and `Wire` of protocol/actors/learner.py in torch."""
