"""Google Cloud Storage by its XML API, with the credentials that Google's own tools find."""

from urllib.parse import quote, urlencode

from parts.volunteers.store.web_store import StoreRequest
from pipeline.net import google


class GoogleEndpoint:
    """The addresses of a folder of a bucket."""

    condition = {"x-goog-if-generation-match": "0"}
    hides = False

    def __init__(self, address: str):
        self._bucket, _, path = address.partition("://")[2].partition("/")
        self.folder = f"{path.strip('/')}/" if path.strip("/") else ""

    def find(self, ask: StoreRequest) -> tuple[str, dict[str, str]]:
        """Return the address of an object or of a listing, and a fresh token."""
        headers = google.authorization(f"gs://{self._bucket}", pushes=ask.verb in ("PUT", "DELETE"))
        base, key = f"{google.endpoint()}/{self._bucket}", f"{self.folder}{ask.name}"
        if ask.verb != "LIST":
            return f"{base}/{quote(key)}", headers
        query = {"list-type": "2", "prefix": key, "encoding-type": "url"}
        query |= {"start-after": f"{self.folder}{ask.after}"} if ask.after else {}
        return f"{base}?{urlencode(query)}", headers
