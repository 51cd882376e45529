"""Import is light, errors travel between processes, the archive is reproducible."""

from __future__ import annotations

import pickle
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from dl_on_spark import errors
from dl_on_spark.jobs.package import build_archive


def test_importing_the_package_loads_neither_tensorflow_nor_spark() -> None:
    code = (
        "import sys, dl_on_spark\n"
        "from dl_on_spark import Allreduce, ElasticAveraging, Gossip, LocalSGD, ParameterServer\n"
        "from dl_on_spark import Schema, Trainer, open_table\n"
        "print([m for m in ('tensorflow', 'keras', 'py4j') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "kind", [k for k in vars(errors).values() if isinstance(k, type) and k.__module__ == errors.__name__]
)
def test_errors_survive_pickling_with_message_and_way_out(kind: type[errors.DLOnSparkError]) -> None:
    error = kind("demo", "extra") if kind is errors.MissingExtraError else kind("what is wrong.", fix="Do this.")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert vars(copy) == vars(error)
    assert str(copy) == str(error)


def test_the_archive_holds_package_and_examples_and_has_the_same_bytes_twice(tmp_path: Path) -> None:
    examples = Path(__file__).parents[1] / "examples"
    names = build_archive(tmp_path / "a.zip", [examples])
    build_archive(tmp_path / "b.zip", [examples])
    assert (tmp_path / "a.zip").read_bytes() == (tmp_path / "b.zip").read_bytes()
    assert {"dl_on_spark/cli.py", "examples/flight_delay/pipeline.yaml"} <= set(names)
    assert not [name for name in names if "__pycache__" in name]
    with zipfile.ZipFile(tmp_path / "a.zip") as archive:
        assert archive.testzip() is None
    with pytest.raises(errors.ConfigError, match="not a folder"):
        build_archive(tmp_path / "c.zip", [tmp_path / "absent"])
