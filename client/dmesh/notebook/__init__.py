"""Notebooks: `%%dmesh` runs a cell on clients that are kept from cell to cell.

```
magics     `%%dmesh` and `%dmesh`, as IPython calls them; imports nothing of IPython's
command    their options                                            (no IO)
clients    the kept clients, as the notebook's process has them: start, run, push, pull, end
client     one of them: runs the cells that it is sent, in one namespace
messages   what the two send each other, over a socket pair that the client inherits
failures   what the user reads about a cell that has failed         (no IO)
```
"""
