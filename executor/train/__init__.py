"""One rank's training: data, loss, optimizer, checkpoints and the loop that reads top to bottom."""
