"""A process that has imported what is dear, and forks whoever asks for a process: the client, and its ``fork``.

Requests come to the server as JSON lines on stdin, answers go as JSON lines to stdout.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any


class ForkServer:
    """The process that forks; it ends with this one.

    Args:
        module: Its main program, which calls ``serve``.
        environment: Its environment variables.
    """

    def __init__(self, module: str, environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        atexit.register(self.close)

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def ask(self, request: dict[str, Any]) -> Any:
        """The answer to a request."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the fork server is gone; its error is on stderr"
        return json.loads(answer)


def serve(answer: Callable[[dict[str, Any]], Any]) -> None:
    """The server's side: answers requests until stdin ends."""
    for line in sys.stdin:
        sys.stdout.write(json.dumps(answer(json.loads(line))) + "\n")
        sys.stdout.flush()


def fork(body: Callable[[], int]) -> int:
    """A child process, leader of a session, that ends with the exit code of ``body``; its process id."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()
        code = body()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
