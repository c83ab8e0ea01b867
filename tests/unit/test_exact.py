"""The comparison of a server's answers: what counts as a success, and settings that a server takes."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.exact import NUM_WORKERS, PLAIN, CircumstanceResult, split
from raydix.configs import Config

WELL = CircumstanceResult("in a crowd", answers=3, tokens=50, counts={"kills": 2})


@pytest.mark.parametrize(
    "changes",
    [{"answers": 0}, {"differing": ["chat 3"]}, {"errors": ["chat 3: 500"]}, {"counts": {"kills": 0}}],
    ids=str,
)
def test_a_circumstance_that_did_not_come_about_proves_nothing(changes: dict[str, object]) -> None:
    assert WELL.is_well
    assert not replace(WELL, **changes).is_well  # type: ignore[arg-type]


def test_the_reference_is_computed_without_cache_and_drafts(tmp_path: Path) -> None:
    plain, full = Config.model_validate(PLAIN), Config.model_validate(split(tmp_path))
    assert (plain.cache.prefix_caching, plain.speculation.mode) == (False, "off")
    assert full.cache.prefix_caching and full.cache.disk_gib and full.speculation.mode == "auto"
    assert len(full.workers.sections) == NUM_WORKERS
