"""Kernels: one folder an operation, its reference beside its fast versions."""
