"""Real engines: collected only where vLLM is installed, see docs/engines.md for the command."""

import os
from importlib.util import find_spec

os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("DO_NOT_TRACK", "1")

collect_ignore_glob = [] if find_spec("vllm") else ["test_*.py"]
