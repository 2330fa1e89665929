"""Runs plans on real devices with torch.distributed, and measures them.

``run.run_job`` checks a job, ``launch.launcher`` starts its ranks with torchrun's elastic agent and watches them; each
rank is ``worker``, in which ``trainer`` holds the stages and takes the steps; ``results`` gathers the measurement.
"""
