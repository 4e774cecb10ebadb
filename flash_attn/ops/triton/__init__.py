"""Operators with a Triton kernel on CUDA and a PyTorch composition elsewhere."""
