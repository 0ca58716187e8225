"""Stages: one module each, run as `python -m tasks STAGE` by DVC, the flow and the command line alike.

Importing this package sets defaults for the libraries, unless the environment says otherwise: telemetry off,
no pickles from MLflow, no progress bars that a log can't show.
"""

import os

DEFAULTS = {
    "DO_NOT_TRACK": "1",
    "DVC_NO_ANALYTICS": "1",
    "GX_ANALYTICS_ENABLED": "false",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ALLOW_PICKLE_DESERIALIZATION": "false",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "TQDM_DISABLE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "GIT_PYTHON_REFRESH": "quiet",
    "TOKENIZERS_PARALLELISM": "false",
}

for _name, _value in DEFAULTS.items():
    os.environ.setdefault(_name, _value)
