"""Products of tokens with the matrices of a layer."""
