"""Routes: how the messages of all ranks become their mean, and the bytes of a message."""
