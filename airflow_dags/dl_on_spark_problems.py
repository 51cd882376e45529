"""Has no DAG: fails to import, so that Airflow shows it, while a pipeline.yaml is wrong. The other DAGs stay."""

from dl_on_spark_airflow.pipelines import find_pipelines

_problems = find_pipelines()[1]
if _problems:
    raise ValueError("no DAG for:\n" + "\n".join(_problems))
