"""Measurements of this machine: matrix products, training steps alone and crowded, a store's speed."""
