"""Timing of kernels, layers and links of this machine, from which simplan predicts."""
