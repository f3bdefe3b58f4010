"""C functions for what decoding steps on a CPU compute between their matrix products, and how they are built."""
