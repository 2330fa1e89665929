"""Steps that differ from each other, or workers whose steps overlap, predicted from Programs of one step."""
