"""dumping_worker, whose blocks are compiled without a compiler: torch's graphs, kernel by kernel."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

import executor.distributed.compiling

if __name__ == "__main__":
    executor.distributed.compiling.BACKEND = "aot_eager_decomp_partition"
    try:
        runpy.run_module("dumping_worker", run_name="__main__")
    finally:
        from torch._dynamo.utils import counters

        graphs = Path(sys.argv[2]) / f"graphs.rank{os.environ['RANK']}"
        graphs.write_text(str(counters["stats"]["unique_graphs"]))
