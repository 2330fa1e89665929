"""simplan: plan, predict and prove distributed training."""

__version__ = "0.1.0"
