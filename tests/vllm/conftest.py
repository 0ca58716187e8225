"""Everything here runs on a real vLLM, in an environment of its own (`make test-vllm`)."""

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]
