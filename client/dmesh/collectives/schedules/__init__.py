"""Schedules of collectives: which slice each rank sends, receives and folds, in which step. Pure data, no IO.

`program` has the instructions and their builder. `direct`, `bruck`, `chain`, `trees`, `ring`, `doubling` and
`scans` are families of schedules; each says in which order it folds. `cost` says what each costs, `choice`
chooses one for a call, and `timing` simulates how long programs take.
"""
