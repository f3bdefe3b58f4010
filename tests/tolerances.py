"""Every tolerance of the test suite, each with its reason. Differences are max|a - b| / max|b| per tensor unless said."""

# Parity with transformers in float32: same operations in another order; one ulp is 6e-8 and sums run over < 1e3 terms.
PARITY_FP32 = 1e-5
