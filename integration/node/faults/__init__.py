"""What faults of GPUs mean, and to which container each is attributed."""
