"""Who holds which tokens, which keys each rank needs, and what it computes and sends when: plain integers."""
