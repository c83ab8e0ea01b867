"""Ray's token, which lets other programs into the cluster: made readable by its owner alone.

Ray writes the token with the permissions that the process's umask happens to leave, mostly for everybody to read, and
its readers may run any code in the cluster.
"""

import contextlib
import os
import secrets
from pathlib import Path

TOKEN_FILE = Path(".ray") / "auth_token"
"""Path under the user's home at which Ray looks for the token."""
TOKEN_BYTES = 32
OWNER_ONLY = 0o600


def secure_token(home: Path) -> None:
    """Make the token if there is none yet, and take an existing one's permissions from everybody but the owner.

    Does nothing if the environment names another mode, a token, or another file.
    """
    if os.environ.get("RAY_AUTH_MODE", "token").lower() != "token":
        return
    if "RAY_AUTH_TOKEN" in os.environ or "RAY_AUTH_TOKEN_PATH" in os.environ:
        return
    path = home / TOKEN_FILE
    with contextlib.suppress(OSError):  # a home without write permission, or of another user: Ray says so itself
        path.parent.mkdir(parents=True, exist_ok=True)
        _create(path)
        if path.stat().st_mode & 0o077:
            path.chmod(OWNER_ONLY)


def _create(path: Path) -> None:
    """Write a new token, whole or not at all; where two servers start at once the first one's counts."""
    if path.exists():
        return
    draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, OWNER_ONLY)
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(TOKEN_BYTES))
    try:
        os.link(draft, path)
    except FileExistsError:
        pass
    finally:
        draft.unlink()
