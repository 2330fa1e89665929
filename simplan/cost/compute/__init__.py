"""Time of kernels."""
