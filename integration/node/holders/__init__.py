"""Which container holds and uses which device, as values."""
