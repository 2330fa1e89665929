"""Network of a cluster as a graph of links, and the traffic of communication on it."""
