# make demo: the whole pipeline on real flights.  make test: all tests.  make check: lint, types, layers.
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: help venv demo test check format faults package interop interop-test airflow clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

venv:  ## make .venv with the pinned dependencies
	@tools/make_venv.sh $(VENV)

demo: venv  ## ETL, two training runs, gate, publish, scores and report.html on real flights
	@$(BIN)/dl-on-spark demo

test: venv  ## run all tests
	@$(BIN)/python -m pytest

check: venv  ## lint, types, import layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: venv  ## format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

faults: venv  ## fault x strategy x moment on real runs, e.g. make faults CELLS=10 SEED=1; all cells take hours
	@$(BIN)/python -m benchmarks.faults $(if $(CELLS),--cells $(CELLS)) $(if $(SEED),--seed $(SEED)) 2> /dev/null

package: venv  ## archive for spark-submit --py-files
	@$(BIN)/dl-on-spark package

interop: interop-test  ## petastorm's own writer and readers against ours, values and speed, in an environment of their own
	@.venv-interop/bin/python -W ignore benchmarks/interop.py --rounds 3 2> /dev/null

interop-test:  ## the values alone
	@tools/make_interop_venv.sh .venv-interop
	@PYSPARK_PYTHON=$(CURDIR)/.venv-interop/bin/python .venv-interop/bin/python -m pytest tests/interop

airflow: venv  ## the DAGs in a real Airflow, in an environment of its own, with real Spark
	@tools/make_airflow_venv.sh .venv-airflow
	@DL_ON_SPARK_VENV=$(abspath $(VENV)) .venv-airflow/bin/python -m pytest tests/airflow

clean:  ## remove what the targets above made
	rm -rf $(VENV) .venv-interop .venv-airflow build dist demo_output .pytest_cache .mypy_cache .ruff_cache .hypothesis
