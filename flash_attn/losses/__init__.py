"""Loss modules."""
