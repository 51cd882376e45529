"""One nightly Airflow DAG for each pipeline.yaml below $DL_ON_SPARK_HOME; see docs/airflow.md."""

from dl_on_spark_airflow.nightly import nightly_dag
from dl_on_spark_airflow.pipelines import find_pipelines

for _pipeline in find_pipelines()[0]:
    globals()[_pipeline.name] = nightly_dag(_pipeline)
