"""Results of workflows written for AReaL: single trajectories, short forms, and interactions with a reward."""
