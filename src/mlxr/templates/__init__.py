"""Chat templates as what they are: programs of strangers, which run in a process that can be stopped.

`sandbox` and `budget` bound what a template may reach and make. `worker` is the process that compiles and renders
templates, under limits that the operating system enforces. `workers` starts such processes, gives them work and
replaces those that overran. Knows no vocabulary and no model.
"""
