"""Starting ranks with torchrun's elastic agent, watching them, and saying why they ended."""
