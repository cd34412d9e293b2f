"""Chat templates: untrusted programs, which run in a process that can be stopped.

`budget` bounds the size and work of a rendering. `worker` is the process that compiles and renders templates, under
limits that the operating system enforces. `workers` starts such processes, gives them work and replaces those that
overran. Knows no vocabulary and no model.
"""
