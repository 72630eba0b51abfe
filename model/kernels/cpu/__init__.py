"""What the CPU kernels share: the instruction sets, the build, vectors of sixteen floats."""
