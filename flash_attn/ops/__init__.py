"""Operators: torch.library registrations and Triton kernels."""
