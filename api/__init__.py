"""What is said on the wire: ttrpc, the messages, and the errors both sides can name."""

# Whether this process is ours alone, so that nobody else uses what its libraries have besides:
# see api.messages. Set before anything else of this package is imported.
alone = False
