"""Which layout to train in: memory and time of every legal one foretold from config.json, none of it run."""
