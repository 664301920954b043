"""Scripts that run inside the virtual environments of other systems; never imported here."""
