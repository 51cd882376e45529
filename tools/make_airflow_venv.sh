#!/bin/sh
# Make .venv-airflow, the environment of the DAGs and their tests (airflow_dags/requirements.txt).
# Usage: tools/make_airflow_venv.sh [folder of the environment, default .venv-airflow]
set -eu
venv=${1:-.venv-airflow}
here=$(cd "$(dirname "$0")/.." && pwd)
list=$here/airflow_dags/requirements.txt

refuse() { echo "dl_on_spark: $*" >&2; exit 2; }

if [ -f "$venv/.installed" ] && [ "$venv/.installed" -nt "$list" ]; then
    exit 0
fi
python=${PYTHON:-python3.11}
"$python" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null ||
    refuse "Airflow 3 needs Python 3.10 to 3.13; $python is not. Name one with PYTHON=/path/to/python3."
echo "Installing Airflow into $venv (about 1.2 GB, a minute or more) ..."
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
# --no-compile: bytecode is made at the first import of what is used.
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile \
    --requirement "$list" pytest pytest-timeout || refuse "the packages could not be installed; pip's message above says why."
touch "$venv/.installed"
