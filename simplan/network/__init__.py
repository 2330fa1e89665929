"""Fabric of a cluster: links, routes, flows of communications, and how communications share links."""
