"""Addresses of a store that speaks S3, each signed for one request with the owner's credentials.

s3fs finds credentials, endpoint and region as everywhere else here, and botocore signs (SigV4).
What an address fixes: its verb and name; for a put, that nothing stands there, and the length.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from lockstep.errors import LockstepError
from parts.volunteers.store.web_store import StoreRequest
from pipeline.net import fsspec_files
from pipeline.net.errors import hide, message

LONGEST = 7 * 24 * 3600  # seconds: no store signs for more
SOON = 900  # seconds for which an address that is used at once is valid
METHODS = {
    "PUT": "put_object",
    "GET": "get_object",
    "DELETE": "delete_object",
    "LIST": "list_objects_v2",
}


class S3Endpoint:
    """The signed addresses of a folder of a bucket that speaks S3."""

    hides = False

    def __init__(self, address: str):
        self._address = address
        self._files, path = fsspec_files.find_file_system(address)
        self._bucket, key, _ = self._files.split_path(path)
        self.folder = f"{key.rstrip('/')}/" if key else ""

    def find(self, ask: StoreRequest) -> str:
        """Sign an S3 address that is used at once."""
        return self.sign([ask], SOON)[ask]

    def sign(self, asks: Sequence[StoreRequest], seconds: int) -> dict[StoreRequest, str]:
        """Return an S3 address for each, that holds for so many seconds from now on."""
        from fsspec import asyn

        try:
            sign_all = partial(self._sign, asks, seconds)
            return asyn.sync(self._files.loop, sign_all, timeout=None)
        except Exception as error:  # no credentials, for one
            raise LockstepError(
                f"{hide(self._address)}: {message(error)}, expected credentials to sign with"
            ) from None

    async def _sign(self, asks: Sequence[StoreRequest], seconds: int) -> dict[StoreRequest, str]:
        client = await self._files.get_s3(self._bucket)
        return {
            ask: await client.generate_presigned_url(
                METHODS[ask.verb], Params=self._parameters(ask), ExpiresIn=seconds
            )
            for ask in asks
        }

    def _parameters(self, ask: StoreRequest) -> dict[str, Any]:
        key = f"{self.folder}{ask.name}"
        match ask.verb:
            case "LIST":
                after = {"StartAfter": f"{self.folder}{ask.after}"} if ask.after else {}
                return {"Bucket": self._bucket, "Prefix": key, **after}
            case "PUT":
                conditions = {"IfNoneMatch": "*", "ContentLength": ask.size}
                return {"Bucket": self._bucket, "Key": key, **conditions}
        return {"Bucket": self._bucket, "Key": key}
