"""Where training takes the weights: norms, directions, gradient flow."""
