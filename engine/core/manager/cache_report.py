"""The state of the cache as the cache endpoint shows it."""

from dataclasses import asdict
from itertools import islice

from raydix.engine.core.manager.directory import Directory
from raydix.engine.core.manager.explain import HITS
from raydix.engine.core.manager.records import US_PER_S

NUM_HOTTEST = 10
NUM_SESSIONS = 20  # latest sessions of the caller's own in a report


def cache_report(directory: Directory, tenant: str, is_admin: bool) -> dict[str, object]:
    """Plain values. Counts since the manager started; `hit_rate` in tokens over the last admissions.

    Only administrators get the contents of the cache, and the hits, misses and evictions of all tenants together.
    Prefixes are the caller's own, for administrators too.
    """
    statistics, segments = directory.statistics, directory.stock.segments
    report: dict[str, object] = {
        "object": "cache",
        "prefix_caching": directory.stock.keeps_segments,
        "block_size": directory.costs.block_size,
        "block_bytes": directory.costs.block_bytes,
        "hit_rate": statistics.hit_rate(None if is_admin else tenant),
        "tenants": {
            name: {
                "requests": use.num_requests,
                "prompt_tokens": use.num_prompt_tokens,
                "hit_tokens": use.num_hit_tokens,
                "saved_s": round(use.saved_s, 6),
                "hit_rate": statistics.hit_rate(name),
            }
            for name, use in statistics.tenants.items()
            if is_admin or name == tenant
        },
        "hottest_prefixes": [
            {
                "token_ids": list(prefix.preview),
                "requests": prefix.num_requests,
                "hit_tokens": prefix.num_hit_tokens,
            }
            for prefix in statistics.hottest(tenant, NUM_HOTTEST)
        ],
    }

    # The latest first, and only as far as they are shown: there may be tens of thousands.
    own = (session for session in reversed(directory.sessions) if session.tenant == tenant)
    report["sessions"] = [
        {
            "requests": session.num_requests,
            "running": len(session.running),
            "prompt_blocks": session.prompt_blocks,
            "blocks": directory.sessions.footprint(session),
            "last_stop": session.last_stop,
            "has_place": directory.turns.place_of(session) is not None,
            "pauses": session.num_pauses,
            "paused_s": round(session.paused_s, 6),
        }
        for session in islice(own, NUM_SESSIONS)
    ]

    if is_admin:
        report["known_sessions"] = len(directory.sessions)
        report["placed_sessions"] = directory.turns.num_placed
        report["paused_sessions"] = directory.turns.num_paused
        report["known_blocks"] = len(directory.stock.blocks)
        report["elastic_workers_wanted"] = None if directory.fleet.plan is None else directory.fleet.plan.num_wanted
        report["workers"] = [
            {
                "id": worker.worker_id,
                "role": str(worker.role),
                "duty": str(worker.duty) if worker.is_elastic else None,
                "node": worker.node,
                "cached_blocks": len(directory.stock.pools[worker.worker_id].blocks),
                "available_blocks": worker.num_free_blocks,
                "empty_blocks": worker.num_empty_blocks,
                "blocks": worker.num_blocks,
                "requests": len(worker.requests),
                "decoding": len(worker.decoding),
                "queued": worker.num_queued,
                "queued_s": worker.queued_us / US_PER_S,
                "token_budget": worker.token_budget,
                "leaving": worker.is_leaving,
                "costs": asdict(worker.costs),
            }
            for worker in directory.fleet.values()
        ]
        report["object_store"] = {
            "segments": len(segments),
            "bytes": segments.store_bytes,
            "budget_bytes": segments.store_budget_bytes,
            "nodes": dict(segments.node_bytes),
        }
        report["links"] = [
            {"source": source, "target": target, **costs._asdict()}
            for (source, target), costs in directory.fleet.links.known().items()
        ]
        report["moved"] = [
            {
                "source": source,
                "target": target,
                "segments": moved.num_segments,
                "blocks": moved.num_blocks,
                "bytes": moved.num_bytes,
            }
            for source, target, moved in directory.stock.moves.latest()
        ]
        report["disk"] = {
            "bytes": segments.disk_bytes,
            "budget_bytes": segments.disk_budget_bytes,
        }
        sources = sorted(statistics.sources.items())
        report["hit_blocks"] = {str(source): count for source, count in sources if source in HITS}
        report["missed_blocks"] = {str(source): count for source, count in sources if source not in HITS}
        report["evicted_blocks"] = {str(reason): count for reason, count in sorted(statistics.evicted_blocks.items())}
    return report
