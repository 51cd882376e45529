#!/bin/sh
# Make .venv with the package and its pinned dependencies, or say in one line what the machine lacks.
# Usage: tools/make_venv.sh [folder of the environment, default .venv]
set -eu
venv=${1:-.venv}
here=$(cd "$(dirname "$0")/.." && pwd)
need_mb=4096

refuse() { echo "dl_on_spark: $*" >&2; exit 2; }

python=${PYTHON:-}
if [ -z "$python" ]; then
    for candidate in python3.11 python3.12 python3.13 python3; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
            python=$candidate
            break
        fi
    done
fi
[ -n "$python" ] || refuse "needs Python 3.11, 3.12 or 3.13; found $(python3 --version 2>/dev/null || echo none). Install one (Debian: apt-get install python3 python3-venv) or name it with PYTHON=/path/to/python3."
"$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null ||
    refuse "needs Python 3.11, 3.12 or 3.13; PYTHON=$python is $("$python" --version 2>/dev/null || echo "not there"). Name another one."
"$python" -c 'import venv, ensurepip' 2>/dev/null ||
    refuse "Python lacks the module venv. Install it (Debian: apt-get install python3-venv)."

java=java
[ -n "${JAVA_HOME:-}" ] && java=$JAVA_HOME/bin/java
version=$("$java" -version 2>&1 | sed -n 's/.*version "\([0-9]*\).*/\1/p' | head -n 1) || true
[ -n "$version" ] || refuse "needs Java 17 or newer for Spark; found none. Install it (Debian: apt-get install openjdk-17-jre-headless) or set JAVA_HOME."
[ "$version" -ge 17 ] || refuse "needs Java 17 or newer for Spark; found Java $version. Install it (Debian: apt-get install openjdk-17-jre-headless) or set JAVA_HOME."

if [ ! -f "$venv/.installed" ]; then
    free_mb=$(df -Pm "$(dirname "$venv")" | awk 'NR==2 {print $4}')
    [ "$free_mb" -ge "$need_mb" ] || refuse "needs $need_mb MB of free disk for $venv; there are $free_mb MB. Free some space."
fi
if [ -f "$venv/.installed" ] && [ "$venv/.installed" -nt "$here/pyproject.toml" ] && [ "$venv/.installed" -nt "$here/constraints.txt" ]; then
    exit 0
fi
echo "Installing dl_on_spark into $venv (TensorFlow and Spark: about 2 GB, a few minutes) ..."
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --constraint "$here/constraints.txt" --editable "$here[demo,dev]" ||
    refuse "the packages could not be installed; pip's message above says why."
touch "$venv/.installed"
