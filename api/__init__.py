"""What is said on the wire: ttrpc, the messages, and the errors both sides can name."""
