"""TCP backend and message transports between the clients of a cluster.

`transport` is the contract of a message transport. `tcp_transport` implements it between processes and hosts,
`local` between the threads of one process, for tests. Both match frames with the same `message_queue`. The
thread that makes a call sends messages through `channel` and `connection`; the transport's does the rest.
"""
