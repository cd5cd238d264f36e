"""Bytes that one person alone can read, who has an Ed25519 key.

    "LSSEALED"  an X25519 public key made for these bytes  what ChaCha20-Poly1305 made of them

The cipher's key is HKDF-SHA-256 of what that key and the reader's X25519 key share; both public
keys are in its info. So it is used once, with a nonce of zeros. The reader's X25519 key is the
point of the Ed25519 key on the other curve (RFC 7748 4.1), and the name of the object is
authenticated with the bytes.
"""

import hashlib

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from lockstep.errors import LockstepError
from parts.volunteers.keys import PRIME, PrivateKey, PublicKey, public_text

MAGIC = b"LSSEALED"
DOMAIN = b"lockstep/sealed/1\0"
KEY_BYTES = 32
NONCE = bytes(12)


def seal(content: bytes, reader: PublicKey, name: str) -> bytes:
    """Return bytes that the holder of a key reads as `content`, under this name alone."""
    ephemeral = X25519PrivateKey.generate()
    own, other = ephemeral.public_key().public_bytes_raw(), _on_x25519(reader)
    cipher = _cipher(ephemeral, other, own, other)
    return MAGIC + own + cipher.encrypt(NONCE, content, name.encode())


def unseal(data: bytes, reader: PrivateKey, name: str) -> bytes:
    """Return what was sealed for the holder of a key.

    Raises:
      LockstepError: it was sealed for another key or name, or is changed.
    """
    start = len(MAGIC) + KEY_BYTES
    ephemeral, own = data[len(MAGIC) : start], _on_x25519(reader.public_key())
    seed = hashlib.sha512(reader.private_bytes_raw()).digest()[:KEY_BYTES]
    try:
        if not data.startswith(MAGIC) or len(ephemeral) < KEY_BYTES:
            raise ValueError
        cipher = _cipher(X25519PrivateKey.from_private_bytes(seed), ephemeral, ephemeral, own)
        return cipher.decrypt(NONCE, data[start:], name.encode())
    except (InvalidTag, ValueError):
        raise LockstepError(
            f"{name}: cannot be opened, expected to be sealed for {public_text(reader)}"
        ) from None


def _cipher(
    private: X25519PrivateKey, public: bytes, eph: bytes, reader: bytes
) -> ChaCha20Poly1305:
    """Return the cipher of a seal; a ValueError where the public key is a point of small order."""
    shared = private.exchange(X25519PublicKey.from_public_bytes(public))
    return ChaCha20Poly1305(HKDF(SHA256(), KEY_BYTES, None, DOMAIN + eph + reader).derive(shared))


def _on_x25519(key: PublicKey) -> bytes:
    """Return the X25519 key that seals for an Ed25519 key: u = (1 + y) / (1 - y)."""
    y = int.from_bytes(key.public_bytes_raw(), "little") % 2**255
    u = (1 + y) * pow(1 - y, -1, PRIME) % PRIME
    return u.to_bytes(KEY_BYTES, "little")
