"""Planner of parallel layouts: predicts memory and time from config.json, without a training step."""
