"""What a layer does to each token by itself, by kind: one file and one function each."""
