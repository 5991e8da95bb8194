"""How each device is: its state machine, the table of all devices, and the table's file."""
