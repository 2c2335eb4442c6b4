"""Notebooks: `%%dmesh` runs a cell on clients that live from cell to cell.

```
magics     `%%dmesh` and `%dmesh`, called by IPython, without imports from it
command    their options                                            (no IO)
clients    the notebook's side of the clients: start, run, push, pull, end
client     the program of a client: runs cells in one namespace
messages   messages between the two, over a socket pair that the client inherits
failures   the report of a failed cell                              (no IO)
```
"""
