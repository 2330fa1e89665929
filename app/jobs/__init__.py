"""Long work that pages start: in processes of its own, so that pages stay responsive and it can be stopped."""
