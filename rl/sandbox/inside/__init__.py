"""Code that runs inside the sandbox, as the package `inside`: it needs only Python. `local.py` is the other side."""
