"""Whether a GPU or MIG device can be given to a container, and what makes it so."""
