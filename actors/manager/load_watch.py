"""Looks at the load of the elastic workers: their duties, and how many are wanted."""

import asyncio
import logging
import time

from raydix.actors.metrics import ManagerMetrics
from raydix.engine.core.log_fields import about
from raydix.engine.core.manager.directory import Directory
from raydix.engine.core.manager.elastic import Plan, PoolLimits, Wanted

logger = logging.getLogger(__name__)

DIVIDE_S = 1.0  # interval between two looks


class LoadWatch:
    """Divides the elastic workers of a directory between prompts and answers, within limits of their number."""

    def __init__(self, directory: Directory, metrics: ManagerMetrics, limits: PoolLimits) -> None:
        self._directory = directory
        self._metrics = metrics
        self.limits = limits
        """Limits of the number of elastic workers, from the next look on."""

    def wanted(self) -> Wanted | None:
        """The number of elastic workers for the present load; None before the first look at the load."""
        plan = self._directory.fleet.plan
        return None if plan is None else Wanted(plan.num_wanted, plan.may_shrink)

    async def run(self) -> None:
        """Divide the elastic workers as the load asks, and find the wanted number, again and again."""
        while True:
            await asyncio.sleep(DIVIDE_S)
            had, plan = self._directory.fleet.plan, self._divide()
            self._metrics.look(self._directory)
            self._metrics.duties([worker.duty for worker in self._directory.fleet.elastic])
            if plan is not None or had is not None:
                self._metrics.wanted(0 if plan is None else plan.num_wanted)
            if plan is not None and (had is None or had.num_wanted != plan.num_wanted):
                extra = about("wanted", workers=plan.num_wanted, was=len(self._directory.fleet.elastic))
                logger.info("%d elastic workers are wanted", plan.num_wanted, extra=extra)
            for worker_id, duty in plan.duties.items() if plan is not None else ():
                extra = about("duty", worker=worker_id, duty=duty)
                logger.info("%s now has the duty %s", worker_id, duty, extra=extra)

    def _divide(self) -> Plan | None:
        """Look at the load; None without elastic workers."""
        if not self._directory.fleet.elastic and self._directory.fleet.plan is None:
            return None
        return self._directory.fleet.divide(self._directory.objectives, time.time(), *self.limits)
