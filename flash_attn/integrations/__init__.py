"""Adapters to libraries with an interface of their own for attention (docs/integrations.md); import each by name."""
