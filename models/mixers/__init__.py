"""How a layer mixes tokens, by the kind of its mixer: one file and one function each."""
