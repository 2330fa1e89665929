"""A whole training run: failures, checkpoints, recovery, days and money, above the prediction of one step."""
