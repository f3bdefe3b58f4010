"""Which layout to train in: memory and time of the legal ones foretold from config.json, none of it run."""
