"""What this machine reaches, measured: matrix products, training steps alone and crowded, a store's speed."""
