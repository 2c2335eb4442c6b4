"""Engines of `dmesh.launch`: run a function on the ranks of a new cluster, on this machine, Dask or Ray.

```
api            the public function: checks its arguments, chooses the engine
rank           one rank: joins the cluster, calls the function, leaves, reports
coordinator    the coordination server of a launch, and the variables with which ranks find it
gang           ranks on an engine's workers: starts, restarts and waits for them
dask, ray      the workers of Dask and of Ray
local          ranks in processes of this machine, started by the launcher of `dmesh run`
local_rank     the program of such a process
failures       the ranks' results, or one error with the first failure on top           (no IO)
serialization  pickled functions, results and exceptions
```
"""
