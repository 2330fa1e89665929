"""Times collectives over all hosts; runs as one rank on each host, with torch's environment variables.

A collective begins when its last rank enters it, and ends when its last rank has its result. Hosts share the clock of
the machine, so both are known exactly.
"""

from __future__ import annotations

import json
import time

import torch
import torch.distributed as dist

from benchmarks.network.cases import COLLECTIVES, SIZES_BYTES
from executor.calibration.communication_timing import collectives_of
from executor.calibration.timing import gathered, together

NUM_ROUNDS = 5
_LATE_S = 1e-3  # ranks of a step do not arrive together, and gloo's algorithms differ when they do


def main() -> None:
    """Prints, on rank 0, the kind, bytes and seconds of each collective as JSON."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    group, rank, num_ranks = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    assert group is not None
    buffers = [torch.zeros(2, size // 4).unbind() for size in SIZES_BYTES]
    links = [link for whole, spare in buffers for link in collectives_of(COLLECTIVES, group, num_ranks, whole, spare)]
    for number in range(-1, NUM_ROUNDS):  # the first round connects the ranks
        for link in links:
            assert link.run is not None
            together()
            if number % num_ranks == rank:
                time.sleep(_LATE_S)
            began_s = time.monotonic()
            link.run()
            ended_s = time.monotonic()
            began_s, ended_s = map(max, zip(*gathered([began_s, ended_s]), strict=True))
            if number >= 0:
                link.seconds.append(ended_s - began_s)
    if rank == 0:
        print(json.dumps([{"kind": link.kind, "num_bytes": link.num_bytes, "seconds": link.seconds} for link in links]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
