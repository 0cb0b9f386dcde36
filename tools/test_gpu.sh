#!/usr/bin/env bash
# Runs the tests marked gpu or kernel from a plain checkout, with the python3 that is there if its own torch sees a GPU (a GPU
# machine often comes with torch and no package index), else in .venv. Further arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."

sees_gpu='import sys, torch, transformers, triton, pytest; sys.exit(not torch.cuda.is_available())'
python=${PYTHON:-python3}
if ! "$python" -c "$sees_gpu" 2>/dev/null; then
    "$python" tools/setup_env.py
    python=.venv/bin/python
    if ! "$python" -c "$sees_gpu"; then
        echo "make test-gpu: torch sees no NVIDIA GPU here; make test runs everything that needs none" >&2
        exit 1
    fi
fi
"$python" - <<'PY'
import platform, torch, transformers, triton
gpu = torch.cuda.get_device_name()
print(f"python {platform.python_version()}  torch {torch.__version__}  triton {triton.__version__}  "
      f"transformers {transformers.__version__}  {torch.cuda.device_count()} x {gpu}")
PY
# -c, not -m pytest: the latter would put this folder first on sys.path for every process of every test.
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" -c 'import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))' -q -m "gpu or kernel" "$@"
