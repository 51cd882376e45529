#!/bin/sh
# Make .venv-interop, the environment in which petastorm's own readers run (tests/interop/requirements.txt).
# Usage: tools/make_interop_venv.sh [folder of the environment, default .venv-interop]
set -eu
venv=${1:-.venv-interop}
here=$(cd "$(dirname "$0")/.." && pwd)
list=$here/tests/interop/requirements.txt

refuse() { echo "dl_on_spark: $*" >&2; exit 2; }

if [ -f "$venv/.installed" ] && [ "$venv/.installed" -nt "$list" ] && [ "$venv/.installed" -nt "$here/pyproject.toml" ]; then
    exit 0
fi
python=${PYTHON:-python3.11}
"$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null ||
    refuse "petastorm's readers were tested on Python 3.11 alone; $python is not. Name one with PYTHON=/path/to/python3.11."
echo "Installing petastorm and what it needs into $venv (about 2 GB, two minutes or more) ..."
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
# --no-compile: bytecode is made at the first import of what is used, not for all of TensorFlow.
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile \
    --requirement "$list" --editable "$here[images]" || refuse "the packages could not be installed; pip's message above says why."
touch "$venv/.installed"
