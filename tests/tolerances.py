"""Every tolerance of the test suite, each with its reason. Differences are max|a - b| / max|b| per tensor unless said."""

# Parity with transformers in float32: same operations in another order; one ulp is 6e-8 and sums run over < 1e3 terms.
PARITY_FP32 = 1e-5

# A closed formula against a plain loop over Python floats (float64): rounding of a handful of float32 operations.
FORMULA_FP32 = 2e-6
# The same in float64: sums of at most a few dozen terms of size one.
FORMULA_FP64 = 1e-12

# Rewards' time-out in tests, in seconds: a hundred times what a worker needs for a cheap call on a loaded machine.
REWARD_TIMEOUT_SECONDS = 1.0
# "At once", in seconds, on a loaded machine with two cores: a process start and a kill take a tenth of it.
SOON_SECONDS = 5.0
