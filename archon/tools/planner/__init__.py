"""Finds the fastest layout that fits, by predicting memory and time from config.json; runs no training step."""
