"""The scenarios that are shipped; see :mod:`integration.simulated.scenario` for their form."""
