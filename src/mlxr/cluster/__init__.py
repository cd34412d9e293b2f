"""Several replicas of a model behind one address: which of them serves a request, and how they are run.

`router` chooses, and knows neither network nor processes; what it knows of the replicas it is told.
"""
