"""spark-submit entry point: `spark-submit --py-files dl_on_spark.zip jobs/doctor.py --config ...`."""

import sys

from dl_on_spark.cli import main

if __name__ == "__main__":
    main(["doctor", *sys.argv[1:]])
