"""C kernels for float32 on a CPU: the operations between a decoding step's matmuls, and their build."""
