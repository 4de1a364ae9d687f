"""How the loss changes around a point: along lines, on planes, under noise."""
