"""The rows of all tables: of the pipeline's own commands, and of those of parts (gate.py there)."""

from tests.gate import folders, servers
from tests.offered import offered

FOLDERS, SERVERS, PEERS = [*folders.ROWS], [*servers.ROWS], []
for _gate in offered("gate"):
    FOLDERS += getattr(_gate, "FOLDERS", [])
    SERVERS += getattr(_gate, "SERVERS", [])
    PEERS += getattr(_gate, "PEERS", [])
