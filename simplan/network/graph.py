"""Free graph of nodes and switches, with paths of the fewest links."""

from __future__ import annotations

from collections import defaultdict

from simplan.network.fabric import GraphBuilder, Interconnect, Route, hash_of_flow

_MAX_ROUTES = 1024


class GraphInterconnect(Interconnect):
    """Links that a user has listed. Of several paths of the fewest links, a hash picks one for each connection.

    With adaptive routing, a flow takes all of them: at each vertex it is divided by the bandwidth of the next links.
    """

    has_routes = True

    def __init__(
        self, builder: GraphBuilder, first_vertex: int, first_link: int, connections: int, seed: int, *, adaptive: bool
    ) -> None:
        """All vertices and links of a builder from the first ones on.

        Args:
            connections, seed: See ``TreeInterconnect``.
        """
        self.num_connections, self._seed, self._adaptive = connections, seed, adaptive
        self._rates = {index: builder.links[index].bytes_per_s for index in range(first_link, len(builder.links))}
        self._links_out: dict[int, list[int]] = {}
        self._links_in: dict[int, list[int]] = {}
        self._ends: dict[int, tuple[int, int]] = {}
        for index, link in enumerate(builder.links[first_link:], first_link):
            self._links_out.setdefault(link.source, []).append(index)
            self._links_in.setdefault(link.destination, []).append(index)
            self._ends[index] = link.source, link.destination
        self._first_vertex = first_vertex
        self._distances: dict[int, dict[int, int]] = {}

    def path(self, source: int, destination: int, connection: int = 0) -> tuple[int, ...]:
        """Links of a path of the fewest links."""
        rest, links, place = hash_of_flow(source, destination, connection, self._seed), [], source
        while place != destination:
            nearer = self._nearer(place, destination)
            rest, choice = divmod(rest, len(nearer))
            links.append(nearer[choice])
            place = self._ends[nearer[choice]][1]
        return tuple(links)

    def routes(self, source: int, destination: int) -> tuple[Route, ...]:
        """Paths of the connections; with adaptive routing all shortest ones, of many those with the largest shares."""
        if not self._adaptive:
            return super().routes(source, destination)
        routes: list[Route] = []
        border: dict[tuple[tuple[int, ...], int], float] = {((), source): 1.0}
        while border:
            longer: defaultdict[tuple[tuple[int, ...], int], float] = defaultdict(float)
            for (path, place), share in border.items():
                if place == destination:
                    routes.append((path, share))
                    continue
                nearer = self._nearer(place, destination)
                total = sum(self._rates[link] for link in nearer)
                for link in nearer:
                    longer[(*path, link), self._ends[link][1]] += share * self._rates[link] / total
            border = dict(sorted(longer.items(), key=lambda item: -item[1])[:_MAX_ROUTES])
        total = sum(share for _, share in routes)
        return tuple((path, share / total) for path, share in routes)

    def _nearer(self, place: int, destination: int) -> list[int]:
        """Links from a vertex to the next ones of its shortest paths."""
        distance = self._distances_to(destination)
        return [link for link in self._links_out[place] if distance.get(self._ends[link][1]) == distance[place] - 1]

    def _distances_to(self, destination: int) -> dict[int, int]:
        """Number of links from every vertex to one, by breadth-first search."""
        distances = self._distances.get(destination)
        if distances is None:
            distances = {destination: 0}
            border, distance = [destination], 0
            while border:
                before = [self._ends[link][0] for vertex in border for link in self._links_in[vertex]]
                border, distance = [vertex for vertex in dict.fromkeys(before) if vertex not in distances], distance + 1
                distances |= dict.fromkeys(border, distance)
            self._distances[destination] = distances
        return distances
