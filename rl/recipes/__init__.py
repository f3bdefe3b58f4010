"""Ready configurations, and datasets of the chat recipes."""
