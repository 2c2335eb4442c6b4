"""Checkpoints of a training program when one of its clients is about to be taken away.

- `termination`: detection of preemptions, and the reaction: `TerminationConfig`.
- `checkpoint_handler`: all clients save at the same step, and end: `PreemptionCheckpointHandler`.
- `watcher`: announcements of preemptions: `PreemptionWatcher`.
"""
