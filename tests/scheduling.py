"""How the workers of pytest-xdist share the tests, also where a test ends the process of one."""

from __future__ import annotations

from xdist.scheduler import LoadGroupScheduling
from xdist.workermanage import WorkerController


class Scheduling(LoadGroupScheduling):
    """`--dist loadgroup`, which runs no test again that has killed its process.

    pytest-xdist 3.8 gives it to the next worker, and so on; and it gives tests to a new worker that
    has not collected them yet, which is an error.
    """

    def remove_node(self, node: WorkerController) -> str | None:
        workload = self.assigned_work.pop(node)
        left = [(unit, name) for unit in workload.values() for name in unit if not unit[name]]
        if not left:
            return None
        unit, crashed = left[0]
        unit[crashed] = True
        self.workqueue.update({scope: x for scope, x in workload.items() if not all(x.values())})
        for other in self.assigned_work:
            self._reschedule(other)
        return str(crashed)

    def _reschedule(self, node: WorkerController) -> None:
        if node in self.registered_collections:
            super()._reschedule(node)
            if self._pending_of(self.assigned_work[node]) == 1:
                # It begins a test once it has the next one, or is told that there is none.
                super()._reschedule(node)
