"""MPS: the control daemon of each resource that is shared by it, and what its clients need."""
