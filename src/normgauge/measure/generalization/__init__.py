"""What training data say about new data: bounds, complexity measures, stability."""
