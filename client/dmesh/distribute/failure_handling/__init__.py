"""Checkpoints of a training program before one of its clients is preempted.

- `termination`: detection of preemptions, and the reaction: `TerminationConfig`.
- `checkpoint_handler`: all clients save at the same step, and end: `PreemptionCheckpointHandler`.
- `watcher`: announcements of preemptions: `PreemptionWatcher`.
"""
