"""What the Triton kernels share: arithmetic that is also right in the interpreter, and the list of what is compiled."""
