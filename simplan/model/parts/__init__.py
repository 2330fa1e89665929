"""Parts of layers that several model families share."""
