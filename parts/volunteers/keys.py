"""Keys of people: an Ed25519 key in a file that nobody else may read, and KEY, its public half.

KEY is `ed25519:` and 64 hexadecimal digits. The file is PKCS #8 in PEM, as openssl writes it.
"""

import os
import re
import stat
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey as PrivateKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey as PublicKey

from lockstep.errors import LockstepError, brief, expecting
from lockstep.files import check_regular_file, read_bytes

MOST_BYTES = 2**12
MODE = 0o600
SCHEME = "ed25519:"
FORM = f"a private key of Ed25519 in PEM, with mode {MODE:o}"
KEY = re.compile(rf"{SCHEME}([0-9a-f]{{64}})")
PRIME = 2**255 - 19
ORDER_8 = 0x5FC536D880238B13933C6D305ACDFD5F098EFF289F4C345B027B2C28F95E826
SMALL_ORDER = {0, 1, PRIME - 1, ORDER_8, PRIME - ORDER_8}  # y of the 8 points


def create(path: Path) -> PrivateKey:
    """Make a key of a person, and write it to a new file.

    Raises:
      LockstepError: there is a file of that name.
    """
    key = PrivateKey.generate()
    content = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    with expecting(path, "to write a new file there"):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, MODE)
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(descriptor)
    return key


def read(path: Path) -> PrivateKey:
    """Read a person's key, which nobody but its owner may read or write.

    Raises:
      LockstepError: others may, or it is not an Ed25519 key.
    """
    with expecting(path, FORM):
        check_regular_file(path)
        mode = stat.S_IMODE(os.stat(path).st_mode)
        if mode & 0o077:
            raise LockstepError(f"{path}: mode {mode:o}, expected {MODE:o}: chmod {MODE:o} {path}")
        content = read_bytes(path, MOST_BYTES)
    try:
        key = serialization.load_pem_private_key(content, None)
    except (TypeError, ValueError, UnsupportedAlgorithm):  # one with a password, or no key
        key = None
    if not isinstance(key, PrivateKey):
        raise LockstepError(f"{path}: found another file, expected {FORM}")
    return key


def public_text(key: PrivateKey | PublicKey) -> str:
    """Return a public key, KEY, as people send it to each other."""
    public = key.public_key() if isinstance(key, PrivateKey) else key
    return f"{SCHEME}{public.public_bytes_raw().hex()}"


def parse_public(text: str, where: str) -> PublicKey:
    """Return the public key of a KEY's text, which `where` names in errors.

    A point of small order is refused, since anybody can make a signature that it accepts.
    """
    match = KEY.fullmatch(text)
    if match is None:
        raise LockstepError(
            f"{where}: found {brief(repr(text), 90)}, expected {SCHEME} and 64 hexadecimal digits"
        )
    point = bytes.fromhex(match[1])
    y = int.from_bytes(point, "little") % 2**255
    if y in SMALL_ORDER or y >= PRIME:
        raise LockstepError(f"{where}: {text} is a point of small order, expected a key")
    return PublicKey.from_public_bytes(point)
