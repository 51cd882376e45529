"""spark-submit entry point: `spark-submit --py-files dl_on_spark.zip jobs/plan.py --config ... --date ...`."""

import sys

from dl_on_spark.cli import main

if __name__ == "__main__":
    main(["plan", *sys.argv[1:]])
