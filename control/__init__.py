"""What processes say to each other: messages, channels, request records, the node registry."""
