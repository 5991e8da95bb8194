"""The services of the agent. None imports another: each reads and publishes the state."""
