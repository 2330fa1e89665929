"""Long tasks that pages start: in separate processes, so that pages stay responsive and tasks can be stopped."""
