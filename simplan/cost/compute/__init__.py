"""Time of compute kernels."""
