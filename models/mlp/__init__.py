"""What a layer does to each token separately: one file and one function for each kind."""
