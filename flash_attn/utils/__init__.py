"""What models and clients share."""
