"""The DAG of a pipeline.yaml. Imports Airflow, PyYAML and the standard library, never dl_on_spark."""
