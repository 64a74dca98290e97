"""Worker groups as Ray actors. The only package that imports Ray."""

import os

# Ray reads these when it is imported. Its uv hook would rebuild the environment for every worker.
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
