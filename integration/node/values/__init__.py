"""Values that several services of the agent share: claims, resources, counters."""
