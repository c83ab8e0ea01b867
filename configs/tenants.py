"""Tenants in a file of their own (`tenants_file`), which each process reads again when it changes.

The file is complete or refused: one that is absent, invalid or without tenants changes nothing, since without tenants a
server would let everybody in.
"""

from dataclasses import dataclass
from pathlib import Path

from pydantic import Field, ValidationError, field_validator

from raydix.configs.load import explain, read_yaml
from raydix.configs.schema import Config, TenantSection, tenants_apart
from raydix.configs.section import Section
from raydix.engine.core.errors import StartupError


class _File(Section):
    """The content of the file."""

    tenants: tuple[TenantSection, ...] = Field(min_length=1)

    _apart = field_validator("tenants")(tenants_apart)


@dataclass(frozen=True, slots=True)
class _Reading:
    """A file as it was read."""

    path: Path
    content: bytes | None
    """None if there was no file."""
    outcome: tuple[TenantSection, ...] | StartupError


class TenantsFile:
    """The tenants' file of one process, and what was read of it last."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._seen: bytes | None = None  # the content that was asked for last, valid or not; None if there was none
        self._reading: _Reading | None = None  # the last one

    def resolved(self, config: Config) -> Config:
        """The configuration with the tenants of its file in the place of the file's name.

        Raises:
            StartupError: the file cannot be read, is not valid, or has no tenants.
        """
        if config.tenants_file is None:
            self._path = None
            return config
        tenants = self.tenants(config.tenants_file)
        try:
            return Config.model_validate(config.model_dump() | {"tenants": tenants, "tenants_file": None})
        except ValidationError as error:
            raise StartupError(f"tenants_file {config.tenants_file}: {'; '.join(explain(error))}") from None

    def tenants(self, name: str) -> tuple[TenantSection, ...]:
        """The tenants of the file of this name, which is looked at from now on. Raises StartupError as `resolved`."""
        path = Path(name).expanduser()
        # Before the content is parsed: what is written meanwhile counts as a change.
        self._path, self._seen = path, _content(path)
        reading = self._reading
        if reading is None or (reading.path, reading.content) != (path, self._seen):
            reading = self._reading = _read(path, self._seen)
        if isinstance(reading.outcome, StartupError):
            raise reading.outcome
        return reading.outcome

    def has_changed(self) -> bool:
        """True if the file has another content than what was asked for last; this content is read, for the next call of
        `tenants`. For a thread of its own: reading a thousand tenants takes a quarter of a second, and the file may be
        left out meanwhile."""
        path = self._path
        if path is None or (content := _content(path)) == self._seen:
            return False
        self._reading = _read(path, content)
        return True


def _read(path: Path, content: bytes | None) -> _Reading:
    """Read a file that had this content a moment ago."""
    try:
        return _Reading(path, content, _File.model_validate(read_yaml(path)).tenants)
    except ValidationError as error:
        return _Reading(path, content, StartupError(f"tenants_file {path}: {'; '.join(explain(error, _File))}"))
    except StartupError as error:
        return _Reading(path, content, error)


def _content(path: Path) -> bytes | None:
    """The content of a file; None if there is none."""
    try:
        return path.read_bytes()
    except OSError:
        return None
