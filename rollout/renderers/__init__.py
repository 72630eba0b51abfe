"""Chat formats: messages to tokens and back, one file a format."""
