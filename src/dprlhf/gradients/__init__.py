"""Per-user gradients from one backward pass, clipped to norm S and summed."""
