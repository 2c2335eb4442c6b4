"""`dmesh run`: N clients of one program, on this machine or on several hosts, watched as one job.

```
plan       what to start: arguments, environment, ports           (no process yet)
ports      loopback ports that nobody else will take meanwhile
exec_client, guard   tiny stand-alone scripts: no client outlives the launcher, even one killed with -9
orphans    the launcher's side of that, and processes that clients leave behind
process    one client; the one that is a process here: its process group, its pipes
local      this machine as the place where clients run
signals    signals as events of a selector
escalation when to ask the clients to end, and when to make them   (no IO)
labels     whole lines with `[rank] ` before them
diagnosis  which failure came first and which are its consequences (no IO)
report     what the user reads about it
job_report the same for programs                                   (no IO)
supervisor the loop that puts all of these together
```

On several hosts the supervisor is the same, and an agent on each host does what it says:

```
hosts, slurm  names of hosts and their slots; ssh's and srun's command lines   (no IO)
across        addresses, token and certificates of clients on several hosts
remote        the hosts as the place where clients run
connection    one host's agent, seen from here, and the clients behind it
agent         the program that ssh or srun starts on a host
frames, outbox, input, error_output   what travels between the two
```
"""

from __future__ import annotations

from dmesh.launcher.plan import LaunchOptions, LaunchPlan, plan_launch
from dmesh.launcher.supervisor import LaunchResult, Supervisor

__all__ = ["LaunchOptions", "LaunchPlan", "LaunchResult", "Supervisor", "plan_launch"]
