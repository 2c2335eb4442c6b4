"""`dmesh.launch`: a function as the ranks of a cluster, in processes that this or another system starts.

```
api          the public function: checks its arguments, chooses the engine
rank         one rank's part: joins the cluster, calls the function, leaves, reports
coordinator  the coordination server of a launch, and the variables by which ranks find it
gang         ranks on somebody else's workers: starts, restarts, waits for them
dask, ray    those workers
local        ranks in processes of this machine, by the launcher of `dmesh run`; local_rank is such a process
failures     from the ranks' ends to their results, or to one error that has the cause first     (no IO)
```
"""
