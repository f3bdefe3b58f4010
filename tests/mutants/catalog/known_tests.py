"""Names of tests that notice mistakes of several rooms."""

from __future__ import annotations

MATRIX = "tests/distributed/test_matrix.py::test_layout_computes_what_one_process_computes"
FURTHER_MATRIX = "tests/distributed/test_matrix.py::test_further_layout_computes_what_one_process_computes"
PARITY = "tests/models/test_parity.py::test_logits_and_every_gradient_equal_transformers"
PIPELINE = "tests/distributed/test_pipeline.py"
