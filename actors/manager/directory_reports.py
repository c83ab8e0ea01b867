"""Reports of the manager's directory to operators and clients."""

from raydix.engine.core.manager.cache_events import CacheUpdate
from raydix.engine.core.manager.cache_report import cache_report
from raydix.engine.core.manager.directory import Directory


class DirectoryReports:
    """The manager's methods that read the directory and change nothing."""

    _directory: Directory

    async def explain(self, name: str, tenant: str | None) -> list[dict[str, object]]:
        """Decisions behind each choice of a request, by the request's name at its client (`Decisions.of`)."""
        decisions = self._directory.decisions.of(name, tenant)
        return [
            {"id": request_id, "attempts": [attempt.as_json() for attempt in attempts]}
            for request_id, attempts in decisions.items()
        ]

    async def cache_report(self, tenant: str, is_admin: bool) -> dict[str, object]:
        """Sizes, hits and evictions of the cache; use of all tenants only for an administrator, of this tenant
        otherwise. The tenant's own hottest prefixes come with their first token ids."""
        return cache_report(self._directory, tenant, is_admin)

    async def events_since(self, sequence: int | None) -> CacheUpdate:
        """Events of stored and removed blocks (`Directory.events_since`)."""
        return self._directory.events_since(sequence)

    def directory_statistics(self) -> dict[str, int]:
        """Sizes, after a check of the directory's integrity."""
        directory = self._directory
        directory.check_integrity()
        return {
            "num_workers": len(directory.workers),
            "num_blocks": directory.num_blocks,
            "num_segments": len(directory.segments),
            "segment_bytes": directory.segments.store_bytes,
            "disk_bytes": directory.segments.disk_bytes,
            "num_reservations": directory.num_reservations,
        }
