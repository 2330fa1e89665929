"""Free graph of nodes and switches, with paths of the fewest links."""

from __future__ import annotations

from simplan.network.fabric import GraphBuilder, Interconnect, hash_of_flow


class GraphInterconnect(Interconnect):
    """Links that a user has listed. A hash picks among several paths of the fewest links, vertex by vertex."""

    def __init__(self, builder: GraphBuilder, first_vertex: int, first_link: int) -> None:
        """All vertices and links of a builder from the first ones on."""
        self._links_out: dict[int, list[int]] = {}
        self._links_in: dict[int, list[int]] = {}
        self._ends: dict[int, tuple[int, int]] = {}
        for index, link in enumerate(builder.links[first_link:], first_link):
            self._links_out.setdefault(link.source, []).append(index)
            self._links_in.setdefault(link.destination, []).append(index)
            self._ends[index] = link.source, link.destination
        self._first_vertex = first_vertex
        self._distances: dict[int, dict[int, int]] = {}

    def path(self, source: int, destination: int) -> tuple[int, ...]:
        """Links of a path of the fewest links."""
        distance = self._distances_to(destination)
        rest, links, place = hash_of_flow(source, destination), [], source
        while place != destination:
            nearer = [
                link for link in self._links_out[place] if distance.get(self._ends[link][1]) == distance[place] - 1
            ]
            rest, choice = divmod(rest, len(nearer))
            links.append(nearer[choice])
            place = self._ends[nearer[choice]][1]
        return tuple(links)

    def _distances_to(self, destination: int) -> dict[int, int]:
        """Number of links from every vertex to one, by breadth-first search."""
        found = self._distances.get(destination)
        if found is None:
            found = {destination: 0}
            border, distance = [destination], 0
            while border:
                before = [self._ends[link][0] for vertex in border for link in self._links_in[vertex]]
                border, distance = [vertex for vertex in dict.fromkeys(before) if vertex not in found], distance + 1
                found |= dict.fromkeys(border, distance)
            self._distances[destination] = found
        return found
