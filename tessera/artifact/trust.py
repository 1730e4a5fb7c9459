"""Whose kernels are run. Machine code in a file is code: it runs if this user built it, or somebody they trust signed.

In: what a file's page 0 says, and the user's own folder ($TESSERA_KEYS, or ~/.config/tessera). Out: a `Verdict`. What a
user builds carries a tag that only a secret of theirs makes (HMAC-SHA256 over the manifest's SHA-256, which covers
every member). Others sign with Ed25519, for which the package `cryptography` is needed. Files in the folder are the
user's alone (0600, the folder 0700); one that others can read or write is refused.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import importlib
import importlib.util
import os
import re
import secrets
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from tessera.artifact.container import Container, Seals, with_seals
from tessera.util.errors import OptionError, TesseraError

SIGNED = b"tessera artifact 1\n"  # what is signed begins with this, so that a signature means nothing elsewhere
OWN, PRIVATE, TRUSTED = "own.key", "signing.key", "trusted.keys"
KEY = re.compile(r"[0-9a-f]{64}")
LONGEST = 1 << 20  # bytes of a file of keys


class TrustError(TesseraError, RuntimeError):
    """Keys that others can read or write, or that are not there."""


@dataclass(frozen=True)
class Verdict:
    trusted: bool
    why: str  # in words, either way


def folder() -> Path:
    chosen = os.environ.get("TESSERA_KEYS")
    return Path(chosen).expanduser() if chosen else Path.home() / ".config" / "tessera"


# --- files of the user's own ---


def _read(name: str) -> str | None:
    """The contents of a private file; None where there is none."""
    path = folder() / name
    kinds = os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        file = os.open(path, os.O_RDONLY | kinds)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise TrustError(f"{path}: {error.strerror}") from error
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise TrustError(f"{path}: expected a plain file")
        for where, status, others in ((path, os.fstat(file), 0o077), (path.parent, os.stat(path.parent), 0o022)):
            if hasattr(os, "getuid") and (status.st_uid != os.getuid() or status.st_mode & others):
                raise TrustError(f"{where}: expected to be its owner's alone; try: chmod go-rwx {where}")
        return os.read(file, LONGEST).decode("ascii", "replace")
    finally:
        os.close(file)


def _secret(name: str) -> str | None:
    """The contents of a file that holds one key. An empty one would be a key that everybody knows."""
    text = _read(name)
    if text is not None and not KEY.fullmatch(text.strip()):
        raise TrustError(f"{folder() / name}: expected a key of 64 hexadecimal digits; remove it, and one is made")
    return None if text is None else text.strip()


def _write(name: str, text: str, new: bool = False) -> None:
    """Whole or not at all. `new`: unless there is one, which another process may have made meanwhile."""
    place = folder()
    place.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle, temporary = tempfile.mkstemp(dir=place, prefix=f".{name}.")  # readable by the owner alone
    try:
        with os.fdopen(handle, "w", encoding="ascii", errors="replace") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if new:
            with contextlib.suppress(FileExistsError):
                os.link(temporary, place / name)
        else:
            os.replace(temporary, place / name)
    finally:
        if os.path.exists(temporary):
            os.unlink(temporary)


# --- what this user builds ---


def own_tag(digest: bytes) -> bytes:
    """The tag of a file that is being built; zeros where the user has no place for a secret."""
    try:
        secret = _secret(OWN)
        if secret is None:
            _write(OWN, secrets.token_hex(32), new=True)
            secret = _secret(OWN)
    except OSError:  # a read-only home: the file is as a stranger's then
        return bytes(32)
    return bytes(32) if secret is None else _tag(secret, digest)


def _tag(secret: str, digest: bytes) -> bytes:
    return hmac.new(secret.encode(), SIGNED + digest, hashlib.sha256).digest()


# --- signatures ---


def sign(path: str | os.PathLike) -> str:
    """Add this user's signature to a file; gives the public key in hexadecimal digits."""
    key = _private_key()
    public = key.public_key().public_bytes_raw()
    with Container.open(path) as file:
        seals, digest = file.seals, file.digest
    others = [pair for pair in seals.signatures if pair[0] != public]
    with_seals(path, Seals(seals.tag, (*others, (public, key.sign(SIGNED + digest)))))
    return public.hex()


def public_key() -> str:
    """Of the key that this user signs with, which is made where there is none."""
    return _private_key().public_key().public_bytes_raw().hex()


def trusted_keys() -> dict[str, str]:
    """Keys that this user trusts, and whose each is."""
    keys = {}
    for line in (_read(TRUSTED) or "").splitlines():
        key, _, name = line.strip().partition(" ")
        if KEY.fullmatch(key):
            keys[key] = name.strip() or key[:16]
    return keys


def add_key(key: str, name: str) -> None:
    if not KEY.fullmatch(key):
        raise OptionError(f"expected a public key of 64 hexadecimal digits, got {key[:80]!r}")
    _write_trusted({**trusted_keys(), key: " ".join(name.split())})


def remove_key(key: str) -> None:
    keys = trusted_keys()
    if keys.pop(key, None) is None:
        raise OptionError(f"{key[:80]!r} is not in the list of trusted keys")
    _write_trusted(keys)


def _write_trusted(keys: dict[str, str]) -> None:
    _write(TRUSTED, "".join(f"{key} {name}\n" for key, name in sorted(keys.items())))


def _private_key() -> Any:
    ed25519 = _ed25519()
    if ed25519 is None:
        raise OptionError("signing needs the package 'cryptography'; try: pip install 'tessera[sign]'")
    text = _secret(PRIVATE)
    if text is None:
        _write(PRIVATE, ed25519.Ed25519PrivateKey.generate().private_bytes_raw().hex(), new=True)
        text = _secret(PRIVATE)
    if text is None:
        raise TrustError(f"{folder() / PRIVATE}: cannot be written")
    return ed25519.Ed25519PrivateKey.from_private_bytes(bytes.fromhex(text))


def _ed25519() -> ModuleType | None:
    try:
        if importlib.util.find_spec("cryptography") is None:
            return None
    except ImportError:
        return None
    return importlib.import_module("cryptography.hazmat.primitives.asymmetric.ed25519")


# --- the verdict ---


@dataclass(frozen=True)
class Signer:
    key: str
    name: str  # as the user calls it; empty where they do not trust it
    state: str  # right · wrong · unknown (nothing here can tell)


def signers(container: Container) -> list[Signer]:
    """Who signed a file, and whether they did."""
    keys, ed25519 = trusted_keys(), _ed25519()
    if ed25519 is not None and container.seals.signatures and _read(PRIVATE) is not None:
        keys = {public_key(): "this user", **keys}
    listed = []
    for public, signature in container.seals.signatures:
        state = "unknown"
        if ed25519 is not None:
            exceptions = importlib.import_module("cryptography.exceptions")
            try:
                ed25519.Ed25519PublicKey.from_public_bytes(public).verify(signature, SIGNED + container.digest)
                state = "right"
            except (exceptions.InvalidSignature, ValueError):
                state = "wrong"
        listed.append(Signer(public.hex(), keys.get(public.hex(), ""), state))
    return listed


def built_here(container: Container) -> bool:
    secret = _secret(OWN)
    return secret is not None and hmac.compare_digest(_tag(secret, container.digest), container.seals.tag)


def verdict(container: Container) -> Verdict:
    """Whether the kernels of a file may run."""
    try:
        if built_here(container):
            return Verdict(True, "built by this user")
        signed = signers(container)
    except TrustError as error:
        return Verdict(False, str(error))
    for signer in signed:
        if signer.state == "right" and signer.name:
            return Verdict(True, f"signed by {signer.name}")
    if any(s.state == "unknown" for s in signed):
        return Verdict(False, "signed, but the package 'cryptography', which checks signatures, is not installed")
    if any(s.state == "wrong" for s in signed):
        return Verdict(False, "its signature is wrong: the file was changed after it was signed")
    strangers = ", ".join(s.key[:16] for s in signed)
    told = f"signed by {strangers}, which is not in the list of trusted keys" if signed else "nobody signed it"
    return Verdict(False, f"not built by this user, and {told}")
