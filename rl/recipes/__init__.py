"""Ready configurations, and the data of those whose prompts are conversations."""
