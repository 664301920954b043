"""What runs inside other systems' own virtual environments: scripts, never imported from here."""
