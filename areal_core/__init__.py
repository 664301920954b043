"""The RL core of AReaL: generation decoupled from training, bounded staleness, decoupled PPO."""
