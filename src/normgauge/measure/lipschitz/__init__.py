"""How much a layer or a network can stretch distances, between two numbers that hold."""
