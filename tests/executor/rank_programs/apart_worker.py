"""executor.worker, where rank 1 sees a file system of its own at the folder that TEST_FOLDER names."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import executor.worker

CLONE_NEWNS = 0x20000  # linux/sched.h

if __name__ == "__main__":
    if os.environ["RANK"] == "1":
        assert ctypes.CDLL(None).unshare(CLONE_NEWNS) == 0
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", os.environ["TEST_FOLDER"]], check=True)
    executor.worker.main(sys.argv[1:])
