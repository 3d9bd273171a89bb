"""The model of one island and its inner steps: the ports `Training` and `Wire` of protocol/actors/ports.py in torch."""
