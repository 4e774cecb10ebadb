"""What one rank computes: calls of the attention backend, the sums of their results, and gradients."""
