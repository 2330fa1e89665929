"""Loss against samples and seconds of ways to train, run on this machine."""
