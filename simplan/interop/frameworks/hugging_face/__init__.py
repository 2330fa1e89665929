"""Configurations of the Hugging Face stack: Trainer, Accelerate, DeepSpeed, and the tools that are made of them."""
