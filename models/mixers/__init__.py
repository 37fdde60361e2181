"""How a layer mixes tokens: one file and one function for each kind of mixer."""
