"""Which container holds which GPU, and what it uses of it."""
