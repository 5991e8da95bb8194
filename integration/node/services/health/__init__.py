"""The health service: decide whether each GPU or MIG device can be allocated, and why not."""
