"""One module per framework: its configuration as sections of a scenario, and jobs as its configuration."""
