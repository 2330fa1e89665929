"""Runs plans on real devices with torch.distributed, and measures them.

``run.run_job`` checks a job. ``launch.launcher`` starts the ranks with torchrun's elastic agent and watches them. Each
rank runs ``worker``, whose ``trainer`` builds the stages and runs the steps. ``results`` collects the measurement.
"""
