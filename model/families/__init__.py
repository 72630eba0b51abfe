"""Published checkpoint families: configuration keys, names of tensors and quirks, one file a family."""
