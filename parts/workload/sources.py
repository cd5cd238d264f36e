"""Where a workload's rows come from: what stage download asks for each of its data locations."""

from parts.workload.rows import arrays, files
from parts.workload.tables import DataArrays, DataFiles, DataWorkload

PROVIDERS = {DataArrays: arrays.PROVIDER, DataFiles: files.PROVIDER, DataWorkload: arrays.PROVIDER}
