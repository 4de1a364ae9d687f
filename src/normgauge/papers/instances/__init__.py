"""The random instances that judges draw: units, layers, networks, Gaussian losses, and their exact derivatives."""
