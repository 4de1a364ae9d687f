"""What passes through the layers: activations, gradients, and how they shift."""
