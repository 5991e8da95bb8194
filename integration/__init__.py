"""How the shim meets the world: the simulated GPU node, packages that are only data."""
