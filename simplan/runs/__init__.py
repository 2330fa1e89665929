"""Files that planner and executor share: jobs, measurements, checkpoint headers."""
