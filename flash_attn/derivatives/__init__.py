"""Forward-mode and second derivatives of attention (docs/derivatives.md)."""
