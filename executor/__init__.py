"""Runs a plan with torch.distributed and measures it: gloo on the CPU, NCCL on CUDA devices.

``run.run_job`` checks a job, ``launch.launch_ranks`` starts its ranks with torchrun (``agent``, ``rank_main``) and
watches them, ``worker`` is one rank, ``trainer`` executes the Level 1 table (``loop``, or ``pipeline`` through torch's
pipelining runtime; ``ddp``, ``fsdp`` and ``zero`` are data parallelism), ``recorder`` writes down what happened and
``results`` gathers it into a Measurement.
"""
