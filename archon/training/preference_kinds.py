"""Losses of preference training by name, and their defaults. Nothing here imports PyTorch."""

from __future__ import annotations

from typing import Literal

PairLoss = Literal["dpo", "ipo", "cpo", "simpo", "orpo", "reward"]

PreferenceLoss = Literal["dpo", "ipo", "cpo", "simpo", "orpo", "kto", "reward"]

REFERENCE_FREE = ("cpo", "simpo", "orpo", "reward")
"""Losses without a reference model."""
LENGTH_NORMALIZED = ("simpo", "orpo")
"""Losses of the mean log-probability of an answer's tokens, not of their sum."""
DEFAULT_BETA = {"dpo": 0.1, "ipo": 0.1, "cpo": 0.1, "simpo": 2.0, "orpo": 0.1, "kto": 0.1}
"""β of each paper's experiments."""
DEFAULT_NLL_COEF = {"cpo": 1.0, "orpo": 1.0}
"""Weight of the negative log-likelihood of chosen answers; 0 for the other losses."""
NLL_OF_PROMPTS = ("orpo",)
"""Losses whose negative log-likelihood includes the prompt, as in ORPO's published implementation and in TRL."""
DEFAULT_GAMMA = 0.5
"""γ of SimPO in TRL; the paper searches 0.3 to 1.6."""
