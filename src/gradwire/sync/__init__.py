"""How gradients and buffers are agreed."""
