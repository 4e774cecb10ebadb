"""Functions of other context-parallel packages on this one; import each module by name."""
