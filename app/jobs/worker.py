"""Worker process: ``python -m app.jobs.worker``, started by ``app.jobs.job``.

A worker reads pickled requests from stdin and answers each with messages on stdout, the last of them ``Done`` or
``Failed``. Workers start before their first request, so that no request waits for imports. SIGINT stops a task, which
returns its results so far. A worker ends with its server.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time
import traceback

from app.jobs.messages import Done, Failed, TaskRequest, Update
from app.jobs.tasks import warm_up
from simplan.errors import RunError

_GIVES_WAY = 5
_PROMPT_S, _GIVES_WAY_FURTHER = 1.5, 15  # the first plans have priority; then pages do


def main() -> None:
    """Runs requests at low priority, so that pages stay responsive."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # who started us may have ignored it
    with os.fdopen(os.dup(1), "wb") as channel:
        os.dup2(2, 1)  # output of libraries goes to stderr
        asked_s = 0.0

        def send(message: Update | Done | Failed) -> None:
            if isinstance(message, Update) and (message.value is not None or time.monotonic() - asked_s > _PROMPT_S):
                os.setpriority(os.PRIO_PROCESS, 0, _GIVES_WAY_FURTHER)
            channel.write(pickle.dumps(message))  # in one piece, also when a signal comes
            channel.flush()

        try:
            warm_up()
            while True:
                request: TaskRequest = pickle.load(sys.stdin.buffer)
                asked_s = time.monotonic()
                if not request.reports_progress:
                    os.setpriority(os.PRIO_PROCESS, 0, _GIVES_WAY)
                try:
                    answer = request.run(send)
                except (BrokenPipeError, KeyboardInterrupt):
                    raise
                except Exception as error:
                    traceback.print_exc()  # the server's log
                    answer = Failed(RunError, (f"{type(error).__name__}: {error}",))
                send(answer)
        except (EOFError, BrokenPipeError, KeyboardInterrupt):
            os._exit(0)  # the server is gone; exit without a traceback


if __name__ == "__main__":
    main()
