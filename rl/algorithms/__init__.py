"""Advantages, policy losses, KL estimators, aggregations and presets: pure functions, each with its source.

Layout: a packed batch of documents, per-token tensors of shape [T] where index t speaks of predicting token t + 1, and
a `loss_mask` that is 1 where that predicted token is trained. Nothing here knows of engines, files or devices.
"""
