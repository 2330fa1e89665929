"""Network of a cluster as a graph of links and switches, with the routes of flows."""
