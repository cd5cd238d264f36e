"""Workers of `parts/workload`, without which this part has nobody to ask."""

from tests.offered import PARTS

if "workload" in PARTS:
    from tests.parts.workload.conftest import source  # noqa: F401
    from tests.parts.workload.worker.conftest import folder, host, model_id  # noqa: F401
else:
    collect_ignore_glob = ["test_*.py"]
