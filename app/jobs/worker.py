"""Worker process: ``python -m app.jobs.worker``, started by ``app.jobs.job``.

A worker reads pickled requests from stdin and answers each with messages on stdout: ``Begun`` first, ``Done`` or
``Failed`` last. Workers start before their first request, so that no request waits for imports. SIGINT stops a task,
which returns its results so far. A worker ends with its server.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time
import traceback

from app.figures.plans import search_plans
from app.jobs.job import Begun, Done, Failed, TaskRequest, Update
from simplan.errors import RunError

_GIVES_WAY = 5
_PROMPT_S, _GIVES_WAY_FURTHER = 1.5, 15  # the first plans have priority; then pages do

_SMALL = """
model: {family: llama, num_hidden_layers: 2, hidden_size: 64, num_attention_heads: 4, intermediate_size: 128,
  vocab_size: 64, seq_len: 32}
cluster: {preset: dgx-h100, num_devices: 2}
training: {global_batch_size: 4}
search: {objectives: [step_time, memory], top: 1, microbatch_size: 1}
"""


def main() -> None:
    """Runs requests at low priority, so that pages stay responsive."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # who started us may have ignored it
    with os.fdopen(os.dup(1), "wb") as channel:
        os.dup2(2, 1)  # output of libraries goes to stderr
        asked_s = 0.0

        def send(message: Begun | Update | Done | Failed) -> None:
            if isinstance(message, Update) and (message.value is not None or time.monotonic() - asked_s > _PROMPT_S):
                os.setpriority(os.PRIO_PROCESS, 0, _GIVES_WAY_FURTHER)
            channel.write(pickle.dumps(message))  # in one piece, also when a signal comes
            channel.flush()

        try:
            search_plans(_SMALL, lambda _: None)  # imports modules, and loads their compiled code
            while True:
                request: TaskRequest = pickle.load(sys.stdin.buffer)
                asked_s = time.monotonic()
                send(Begun())
                if not request.reports_progress:
                    os.setpriority(os.PRIO_PROCESS, 0, _GIVES_WAY)
                try:
                    answer = request.run(send)
                except (BrokenPipeError, KeyboardInterrupt):
                    raise
                except Exception as error:
                    traceback.print_exc()  # the server's log
                    answer = Failed(RunError(f"{type(error).__name__}: {error}"))
                send(answer)
        except (EOFError, BrokenPipeError, KeyboardInterrupt):
            os._exit(0)  # the server is gone; exit without a traceback


if __name__ == "__main__":
    main()
