"""Where the nodes of a run come from."""
