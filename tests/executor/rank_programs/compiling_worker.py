"""dumping_worker, whose blocks are compiled without a compiler: torch's graphs, kernel by kernel."""

from __future__ import annotations

import runpy

import executor.compiling

if __name__ == "__main__":
    executor.compiling.BACKEND = "aot_eager_decomp_partition"
    runpy.run_module("dumping_worker", run_name="__main__")
