"""The tokens and needed keys of each rank, and the order of its computations and transfers: plain integers."""
