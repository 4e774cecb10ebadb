"""What moves between ranks: messages, copies between GPUs, collectives, and comparisons of the ranks' arguments."""
