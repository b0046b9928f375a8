"""Collect these tests only where TRITON_INTERPRET=1 makes Triton interpret kernels."""

import os

# Triton decides when it is imported. A process with other tests must not be changed by these.
collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]
