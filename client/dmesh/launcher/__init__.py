"""`dmesh run`: N clients of one program on this machine, watched as one job.

```
plan       what to start: arguments, environment, ports           (no process yet)
ports      loopback ports that nobody else will take meanwhile
exec_client, guard   tiny stand-alone scripts: no client outlives the launcher, even one killed with -9
orphans    the launcher's side of that, and what clients leave behind
process    one client: its process group, its pipes, its end
signals    signals as events of a selector
escalation when to ask the clients to end, and when to make them   (no IO)
labels     whole lines with `[rank] ` before them
diagnosis  which failure came first and which are its consequences (no IO)
report     what the user reads about it
account    the same for programs                                   (no IO)
supervisor the loop that puts all of these together
```
"""

from __future__ import annotations

from dmesh.launcher.plan import LaunchOptions, LaunchPlan, plan_launch
from dmesh.launcher.supervisor import LaunchResult, Supervisor

__all__ = ["LaunchOptions", "LaunchPlan", "LaunchResult", "Supervisor", "plan_launch"]
