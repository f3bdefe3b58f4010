"""`python -m archon`, also under torchrun: the same command as `archon`."""

from __future__ import annotations

from archon.cli import main

if __name__ == "__main__":
    main()
