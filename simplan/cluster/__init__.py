"""Devices, links and the clusters they form."""
