"""Other frameworks' ways to write a rollout, for people who move from them; the core knows nothing of these."""
