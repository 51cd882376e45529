"""Bodies of the jobs: each takes a Spark session, the pipeline and a date, and returns a report.

A new job is one file here with `run(spark, config, date, ...) -> dict`, one line in
`dl_on_spark/cli.py`, and one entry script in `jobs/`.
"""
