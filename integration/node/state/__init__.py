"""The shared state of the agent's services: immutable values in a typed store."""
