"""What a model is: configuration, layers, weights, identity."""
