"""The names of other packages of context parallelism on this one; import each module by name."""
