"""The health of devices: one device's state machine, the table of all devices, and its file."""
