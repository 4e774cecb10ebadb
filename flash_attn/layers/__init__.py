"""Layers built around attention."""
