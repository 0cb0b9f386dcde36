#!/usr/bin/env bash
# Runs the tests that need a GPU from a plain checkout, with the python3 that is there if its own torch sees a GPU (a GPU
# machine often comes with torch and no package index), else in .venv. Only test files with such tests are imported, so
# packages that the others need may be missing. Arguments go to pytest; paths among them replace that choice of files.
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
print(f"python {platform.python_version()}  torch {torch.__version__}  triton {triton.__version__}  "
      f"transformers {transformers.__version__}  {torch.cuda.device_count()} x {torch.cuda.get_device_name()}")
PY

files=()
case " $* " in
    *" tests"*) ;;
    *) mapfile -t files < <(grep -rlE --include='test_*.py' 'pytest\.mark\.(gpu|kernel)\b' tests | sort) ;;
esac
# PYTHONPATH reaches the processes that tests start, as an installed package would.
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" -m pytest -q -m "gpu or kernel" "$@" "${files[@]}"
