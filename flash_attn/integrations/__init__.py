"""Adapters to libraries that define an interface for attention (docs/integrations.md); import each by name."""
