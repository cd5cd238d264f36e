"""Files in a bucket of Google Cloud Storage: for the `Gcp` location of `data_location.Http`.

Each file is held to the generation that the listing names.
"""

from lockstep.errors import LockstepError
from pipeline.net.google_files import BucketFolder
from pipeline.runfile import Network
from pipeline.sources.listing import LocationFile


def list_bucket(bucket: str, folder: str, network: Network) -> tuple[LocationFile, ...]:
    """Return the files in a folder of a bucket, by name.

    Raises:
      LockstepError: the bucket cannot be read, or its listing is invalid.
    """
    found = BucketFolder(bucket, folder, network)
    files = found.files(below=True)
    if not files:
        raise LockstepError(
            f"{found.name}: found no files, expected some in this folder of the bucket"
        )
    return tuple(
        LocationFile(name=name, origin=found.origin(name, file))
        for name, file in sorted(files.items())
    )
