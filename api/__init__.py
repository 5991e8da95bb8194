"""The wire: ttrpc, the messages, and the errors that both sides know."""
